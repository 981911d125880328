"""Block-diffusion decoding for a transformers model; shipped inside exported folders, needs torch and transformers.

A block starts as its anchor, taken from the causal logits (shifted models), and MASK tokens. Each pass, attention is
bidirectional inside the block and the prefix is read from the cache; a policy says what is revealed. A last pass
commits the finished block to the cache. Settings come from the config's `block_diffusion` entry.

Shape letters: N rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

DEFAULTS: dict[str, float | None] = {
    "threshold": 0.9,
    "factor": 1.0,
    "entropy": 0.5,
    "top_k": None,
    "left_to_right": None,
}


def choose_reveals(
    policy: str,
    parameter: Any,
    confidence: Sequence[float],
    entropy: Sequence[float],
    positions: Sequence[int],
    passes_left: int,
) -> list[int]:
    """The positions to reveal in this pass: at least ceil(masked / passes left), ties to the lowest position."""
    keys: Sequence[float] = {"entropy": entropy, "left_to_right": positions}.get(policy, [-c for c in confidence])
    order = sorted(range(len(positions)), key=lambda idx: (keys[idx], positions[idx]))
    ranked = [confidence[idx] for idx in order]
    count = 0
    if policy == "threshold":
        count = sum(value > parameter for value in ranked)
    elif policy == "factor":
        count = max((n for n, value in enumerate(ranked, 1) if (n + 1) * (1.0 - value) < parameter), default=0)
    elif policy == "entropy":
        total = 0.0
        for idx in order:
            total += entropy[idx]
            if total > parameter:
                break
            count += 1
    least = math.ceil(len(positions) / passes_left)
    return sorted(positions[idx] for idx in order[: max(count, least)])


class BlockDiffusionMixin:
    """`generate` by block diffusion, before the family's own model class."""

    config: Any
    generation_config: Any

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 256,
        mode: str = "diffusion",
        block_size: int | None = None,
        denoising_steps: int | None = None,
        policy: str = "threshold",
        policy_parameter: float | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        **others: Any,
    ) -> Tensor:
        """Token ids of prompt and answer, shape (batch, length), padded on the right.

        Args:
            mode: "diffusion", or "ar" for the model class's own token-by-token generation (causal models only).
            block_size: one of the trained sizes; None is the checkpoint's own.
            denoising_steps: passes a block at most; None allows one a token.
            policy: threshold, top_k, factor, entropy or left_to_right, with its one number `policy_parameter`.
            temperature: 0 takes the most likely token.

        Raises:
            ValueError: a setting that this model does not have; nothing is ignored.
        """
        settings = self.config.block_diffusion
        if mode == "ar":
            if not settings["shift_logits"] or settings["clean_attention"] != "causal":
                raise ValueError("mode 'ar' needs shifted logits and causal clean attention")
            return super().generate(  # type: ignore[misc,no-any-return]
                input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, generator=generator, **others
            )
        if mode != "diffusion" or others:
            raise ValueError(f"not a setting of block diffusion: {sorted(others) or mode}")
        if policy not in DEFAULTS:
            raise ValueError(f"policy is one of {sorted(DEFAULTS)}, not {policy!r}")
        if (block_size or settings["block_size"]) not in settings["trained_block_sizes"]:
            raise ValueError(f"block_size is one of {settings['trained_block_sizes']}, not {block_size}")
        parameter = DEFAULTS[policy] if policy_parameter is None else policy_parameter
        rows = []
        for idx, ids in enumerate(input_ids):
            prompt = ids if attention_mask is None else ids[attention_mask[idx].bool()]
            state = _Decoding(self, settings, block_size or settings["block_size"], temperature, generator)
            steps = denoising_steps or state.block_size
            rows.append(torch.cat((prompt, state.answer(prompt, max_new_tokens, steps, policy, parameter))))
        pad = self.generation_config.pad_token_id
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0 if pad is None else pad)


class _Decoding:
    """One prompt's decoding: its cache and its rules."""

    def __init__(
        self,
        model: Any,
        settings: dict[str, Any],
        block_size: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> None:
        self.model, self.settings, self.block_size = model, settings, block_size
        self.temperature, self.generator = temperature, generator
        self.mask_id, self.shift = settings["mask_token_id"], settings["shift_logits"]
        self.cache = DynamicCache(config=model.config)
        ends = model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    def answer(self, prompt: Tensor, max_new_tokens: int, steps: int, policy: str, parameter: Any) -> Tensor:
        """The answer's ids, its end of turn included."""
        limit = min(max_new_tokens, self.model.config.max_position_embeddings - len(prompt))
        if limit < 1:
            raise ValueError("the prompt leaves no room for an answer")
        last_NV = self._forward(prompt.tolist(), causal=True, keep=True)[-1:]
        ids: list[int] = []
        while len(ids) < limit and not self.ends.intersection(ids):
            block: list[int | None] = [None] * min(
                self.block_size, self.model.config.max_position_embeddings - len(prompt) - len(ids)
            )
            if self.shift:
                block[0] = self._choose(last_NV)[0][0]
            self._denoise(block, limit - len(ids), steps, policy, parameter)
            ids += [token for token in block if token is not None]
            if None not in block:
                last_NV = self._forward(
                    ids[-len(block) :], causal=self.settings["clean_attention"] == "causal", keep=True
                )[-1:]
        return torch.tensor(self._cut(ids, limit), dtype=prompt.dtype, device=prompt.device)

    def _denoise(self, block: list[int | None], wanted: int, steps: int, policy: str, parameter: Any) -> None:
        """Reveal the block's places, in place; those right of a revealed end of turn stay open."""
        for pass_idx in range(len(block)):
            end = min([wanted, *(idx for idx, token in enumerate(block) if token in self.ends)])
            places = [idx for idx, token in enumerate(block[:end]) if token is None]
            if not places:
                return
            shown = [self.mask_id if token is None else token for token in block]
            logits_NV = self._forward(shown, causal=False, keep=False)
            rows_NV = logits_NV[[place - 1 if self.shift else place for place in places]]
            tokens, confidence, entropy = self._choose(rows_NV)
            left = max(1, steps - pass_idx)
            for place in choose_reveals(policy, parameter, confidence, entropy, places, left):
                block[place] = tokens[places.index(place)]

    def _forward(self, tokens: Sequence[int], *, causal: bool, keep: bool) -> Tensor:
        """Logits of tokens after the cached prefix, shape (N, V), what is never said at minus infinity."""
        before, count, model = self.cache.get_seq_length(), len(tokens), self.model
        seen = torch.ones(count, before + count, dtype=torch.bool, device=model.device)
        if causal:
            seen = seen.tril(diagonal=before)
        bias = torch.zeros(seen.shape, dtype=model.dtype, device=model.device)
        bias.masked_fill_(~seen, torch.finfo(model.dtype).min)
        out = model(
            input_ids=torch.tensor([tokens], device=model.device),
            attention_mask=bias[None, None],
            position_ids=torch.arange(before, before + count, device=model.device)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        if not keep:
            self.cache.crop(-count)
        logits_NV: Tensor = out.logits[0].float()
        logits_NV[:, self.mask_id] = -math.inf
        logits_NV[:, self.settings["num_known_ids"] :] = -math.inf
        return logits_NV

    def _choose(self, logits_NV: Tensor) -> tuple[list[int], list[float], list[float]]:
        """Tokens, their confidence under the raw logits, and the entropy, a list each."""
        logprobs_NV = logits_NV.log_softmax(dim=-1)
        if self.temperature > 0:
            probs_NV = (logits_NV / self.temperature).softmax(dim=-1)
            tokens_N = torch.multinomial(probs_NV, 1, generator=self.generator)[:, 0]
        else:
            tokens_N = logits_NV.argmax(dim=-1)
        confidence_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0].exp()
        entropy_N = torch.special.entr(logprobs_NV.exp()).sum(dim=-1)
        return tokens_N.tolist(), confidence_N.tolist(), entropy_N.tolist()

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        for idx, token in enumerate(ids):
            if token in self.ends:
                return ids[: idx + 1][:limit]
        return ids[:limit]
