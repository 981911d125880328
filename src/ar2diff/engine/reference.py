"""What the right answer is: decoding with no cache, no fused passes and one whole forward for everything.

Slow on purpose. The engine equals it token by token; change the two only together. Greedy verified decoding is AR
decoding, so it has no rule of its own here. Shape letters: N rows, V vocabulary.
"""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count, takewhile

import torch
from torch import Tensor

from ar2diff.attention.masks import TokenPlaces, build_visible_mask
from ar2diff.attention.ops import masked_attend
from ar2diff.diffusion.unmask import choose_reveals
from ar2diff.engine.generation import FinishReason, Pick, TokenLogprob
from ar2diff.engine.grammar import Automaton, Grammar
from ar2diff.engine.request import Request, check_request
from ar2diff.engine.sampling import Sampler
from ar2diff.models.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceAnswer:
    """A right answer; fields as in `Generation`."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    prompt_logprobs: tuple[float | None, ...] = ()


def generate_reference(loaded: LoadedModel, request: Request, *, grammar: Grammar | None = None) -> ReferenceAnswer:
    """What `Engine.generate` must give. `grammar` is the request's constraint, compiled."""
    check_request(request, loaded.config, loaded.diffusion)
    assert request.mode != "verified" or request.temperature == 0.0
    assert (grammar is None) == (request.constraint is None)
    twin = _Twin(loaded, request, grammar)
    with torch.inference_mode():
        return replace(_decode(twin, loaded, request), prompt_logprobs=twin.score_prompt())


def _decode(twin: "_Twin", loaded: LoadedModel, request: Request) -> ReferenceAnswer:
    if request.max_tokens == 0:
        return _build_answer([], "", "length")
    if request.mode != "diffusion":
        return twin.decode_tokens()
    assert loaded.diffusion is not None
    block_size = request.block_size or loaded.diffusion.block_size
    if loaded.diffusion.anchor == "last":
        return twin.decode_from_last(block_size)
    return twin.decode_blocks(block_size, loaded.diffusion.shift_logits)


class _Twin:
    def __init__(self, loaded: LoadedModel, request: Request, grammar: Grammar | None) -> None:
        self.loaded, self.request, self.grammar = loaded, request, grammar
        self.ends = loaded.tokenizer.eos_token_ids
        unknown = loaded.tokenizer.list_unknown(loaded.config.vocab_size)
        mask = [loaded.diffusion.mask_token_id] if loaded.diffusion else []
        self.sampler = Sampler(request, [*unknown, *mask], device=loaded.decoder.embedding.weight.device)
        self.limit = min(request.max_tokens, loaded.config.max_seq_len - len(request.prompt_ids))

    def score_prompt(self) -> tuple[float | None, ...]:
        if self.request.prompt_logprobs is None:
            return ()
        logits_LV = self.sampler.ban(whole_logits(self.loaded, self.request, [], [], 1))
        rows = zip(logits_LV.log_softmax(dim=-1), self.request.prompt_ids[1:], strict=False)
        return (None, *(float(logprobs_V[token_id]) for logprobs_V, token_id in rows))

    def decode_tokens(self) -> ReferenceAnswer:
        picks = list[Pick]()
        while (answer := self.finish(picks)) is None:
            picks.append(self.choose_next(picks, 1))
        return answer

    def decode_blocks(self, block_size: int, shift: bool) -> ReferenceAnswer:
        picks = list[Pick]()
        while True:
            size = min(block_size, self.loaded.config.max_seq_len - len(self.request.prompt_ids) - len(picks))
            block: list[Pick | None] = [None] * size
            anchor = self.choose_next(picks, block_size) if shift else None
            if not self.request.fused_commit:
                block[0] = anchor
            for pass_idx in count():
                if (answer := self.finish(picks + _settled(block))) is not None:
                    return answer
                masked = self.open_places(block, self.limit - len(picks), first=int(shift))
                if not any(masked) and None not in block[: 1 if shift else 0]:
                    break
                logits_SV = _block_logits(self.loaded, self.request, _ids(picks), block, block_size)
                self.denoise(logits_SV, picks, block, masked, pass_idx=pass_idx, anchor=anchor)
            picks += _settled(block)

    def decode_from_last(self, block_size: int) -> ReferenceAnswer:
        assert self.loaded.diffusion is not None
        mask_token_id, picks = self.loaded.diffusion.mask_token_id, list[Pick]()
        while True:
            size = min(block_size - 1, self.loaded.config.max_seq_len - len(self.request.prompt_ids) - len(picks))
            block: list[Pick | None] = [None] * size
            for pass_idx in count():
                if (answer := self.finish(picks + _settled(block))) is not None:
                    return answer
                masked = self.open_places(block, self.limit - len(picks), first=0)
                if not any(masked):
                    break
                shown = [mask_token_id if pick is None else pick.token_id for pick in block]
                *before, last = (*self.request.prompt_ids, *_ids(picks))
                # The row left of a place predicts it, and the first row is the last known token's.
                logits_SV = logits_of(self.loaded, before, [last, *shown], block_size)[len(before) : -1]
                self.denoise(logits_SV, picks, block, masked, pass_idx=pass_idx, anchor=None)
            picks += _settled(block)

    def denoise(
        self,
        logits_SV: Tensor,
        before: list[Pick],
        block: list[Pick | None],
        masked: list[bool],
        *,
        pass_idx: int,
        anchor: Pick | None,
    ) -> None:
        """Reveal what the policy picks; shifted, the row left of a place predicts it."""
        revealed = _ids([*before, *(pick for pick in block if pick is not None)])
        rows_SV = self.sampler.prepare(logits_SV, [revealed] * len(block))
        rows_SV = rows_SV if anchor is None else rows_SV.roll(1, dims=0)
        shows_anchor = anchor is not None and block[0] is None
        block[0] = block[0] or anchor
        leftmost = None if shows_anchor or None not in block else block.index(None)
        settled = _settled(block)
        form = self.follow([*before, *settled])
        if form is not None and leftmost is not None:
            self.sampler.restrict(rows_SV[leftmost : leftmost + 1], [form.allowed()])
        picks = self.sampler.choose(
            rows_SV, [(len(before) + idx, pass_idx) for idx in range(len(block))], entropy=True
        )
        chosen = choose_reveals(
            self.request.build_policy(),
            confidence=[math.exp(pick.logprob) for pick in picks],
            entropy=[pick.entropy for pick in picks],
            masked=masked,
            passes_left=max(1, (self.request.denoising_steps or len(block)) - pass_idx),
        )
        if form is not None:
            is_ended = bool(settled) and settled[-1].token_id in self.ends
            run = takewhile(lambda idx: idx == leftmost or idx in chosen, range(len(settled), len(block)))
            chosen = [] if is_ended else self.keep_allowed(form, run, picks)
        for idx in chosen:
            block[idx] = picks[idx]

    def keep_allowed(self, form: Automaton, run: Iterable[int], picks: list[Pick]) -> list[int]:
        """The places of `run`, as long as each token is allowed after those before it."""
        kept = list[int]()
        for idx in run:
            if not form.allowed()[picks[idx].token_id]:
                break
            kept.append(idx)
            if picks[idx].token_id in self.ends:
                break
            form.advance(picks[idx].token_id)
        return kept

    def choose_next(self, picks: list[Pick], block_size: int) -> Pick:
        """The token that the causal logits at the last clean position give."""
        ids = _ids(picks)
        logits_NV = whole_logits(self.loaded, self.request, ids, [], block_size)[-1:]
        self.sampler.prepare(logits_NV, [ids])
        form = self.follow(picks)
        self.sampler.restrict(logits_NV, [form.allowed()] if form is not None else [])
        return self.sampler.choose(logits_NV, [(len(ids), 0)])[0]

    def follow(self, picks: list[Pick]) -> Automaton | None:
        """Where the constraint stands after these tokens."""
        form = self.grammar.start() if self.grammar is not None else None
        for pick in picks:
            if form is not None and pick.token_id not in self.ends:
                form.advance(pick.token_id)
        return form

    def open_places(self, block: list[Pick | None], wanted: int, *, first: int) -> list[bool]:
        """Places that may be revealed: masked, before the limit, and left of any revealed end of turn."""
        ends = [idx for idx, pick in enumerate(block) if pick is not None and pick.token_id in self.ends]
        end = min([wanted, *ends])
        return [pick is None and first <= idx < end for idx, pick in enumerate(block)]

    def finish(self, settled: list[Pick]) -> ReferenceAnswer | None:
        """The answer, once the settled tokens hold its end; tokens after the end do not matter."""
        for num in range(1, len(settled) + 1):
            is_end = settled[num - 1].token_id in self.ends
            kept = settled[: num - 1] if is_end else settled[:num]
            form = self.follow(kept)
            is_end = is_end or (form is not None and form.is_complete)
            text = self.loaded.tokenizer.decode(_ids(kept))
            is_last = is_end or num == self.limit
            # A text that breaks off inside a character waits for the rest of it.
            found = [] if text.endswith("\ufffd") and not is_last else _find_stops(self.request, text)
            if found:
                end, negative_len = min(found)
                return _build_answer(kept, text[: end if self.request.include_stop else end + negative_len], "stop")
            if is_last:
                return _build_answer(kept, text, "stop" if is_end else "length")
        return None


def _settled(block: list[Pick | None]) -> list[Pick]:
    """The revealed tokens before the first mask."""
    return [pick for pick in takewhile(lambda pick: pick is not None, block) if pick is not None]


def _ids(picks: Iterable[Pick]) -> list[int]:
    return [pick.token_id for pick in picks]


def _build_answer(kept: list[Pick], text: str, reason: FinishReason) -> ReferenceAnswer:
    return ReferenceAnswer(
        token_ids=tuple(_ids(kept)),
        text=text,
        finish_reason=reason,
        logprobs=tuple(pick.logprob for pick in kept),
        top_logprobs=tuple(pick.top for pick in kept),
    )


def _find_stops(request: Request, text: str) -> list[tuple[int, int]]:
    return [(text.find(stop) + len(stop), -len(stop)) for stop in request.stop if stop in text]


def _block_logits(
    loaded: LoadedModel, request: Request, ids: list[int], block: list[Pick | None], block_size: int
) -> Tensor:
    """Logits at the positions of a block that follows `ids`, shape (S, V)."""
    assert loaded.diffusion is not None
    shown = [loaded.diffusion.mask_token_id if pick is None else pick.token_id for pick in block]
    return whole_logits(loaded, request, ids, shown, block_size)[-len(block) :]


def whole_logits(loaded: LoadedModel, request: Request, ids: list[int], noisy: list[int], block_size: int) -> Tensor:
    """One forward over prompt, clean answer and noisy block under the visibility rule of training."""
    return logits_of(loaded, [*request.prompt_ids, *ids], noisy, block_size, blocks_start=len(request.prompt_ids))


def logits_of(
    loaded: LoadedModel, clean: list[int], noisy: list[int], block_size: int, *, blocks_start: int | None = None
) -> Tensor:
    """One forward over clean tokens and a noisy block, shape (L, V).

    Args:
        blocks_start: where the first block begins; at the noisy one by default.
    """
    tokens = torch.tensor([*clean, *noisy], device=loaded.decoder.embedding.weight.device)
    position_idx = torch.arange(len(tokens), device=tokens.device)
    answer_idx = position_idx - (len(clean) if blocks_start is None else blocks_start)
    places = TokenPlaces(
        document_idx=torch.zeros_like(tokens),
        stream_idx=(position_idx >= len(clean)).long(),
        block_idx=answer_idx.div(block_size, rounding_mode="floor").clamp(min=-1),
        position_idx=position_idx,
    )
    rule = loaded.diffusion.clean_attention if loaded.diffusion else "causal"
    attend = masked_attend(build_visible_mask(places, places, clean_attention=rule), loaded.config.softmax_scale)
    adapter = loaded.decoder.adapter
    # An adapter drafts at the noisy block; the clean text is the parent's.
    with adapter.gated((places.stream_idx == 1)[None]) if adapter else nullcontext():
        hidden_LE = loaded.decoder(tokens[None], position_idx[None], attend)[0]
    return loaded.decoder.logits(hidden_LE).float()
