"""What the right answer is: decoding with no cache, no fused passes and one whole forward for everything.

Slow on purpose. The engine equals it token by token; change the two only together. Greedy verified decoding is AR
decoding, so it has no rule of its own here. Shape letters: N rows, V vocabulary.
"""

import math
from contextlib import nullcontext
from itertools import count, takewhile

import torch
from torch import Tensor

from ar2diff.attention.masks import TokenPlaces, build_visible_mask
from ar2diff.attention.ops import masked_attend
from ar2diff.diffusion.unmask import choose_reveals
from ar2diff.engine.request import Request, check_request
from ar2diff.engine.sampling import Sampler
from ar2diff.models.loading import LoadedModel

Answer = tuple[tuple[int, ...], str, str]


def generate_reference(loaded: LoadedModel, request: Request) -> Answer:
    """The answer's ids, text and finish reason, as `Engine.generate` gives them."""
    check_request(request, loaded.config, loaded.diffusion)
    assert request.mode != "verified" or request.temperature == 0.0
    with torch.inference_mode():
        if request.mode != "diffusion":
            return _decode_tokens(loaded, request)
        assert loaded.diffusion is not None
        block_size = request.block_size or loaded.diffusion.block_size
        return _decode_blocks(loaded, request, block_size, loaded.diffusion.shift_logits)


def _decode_tokens(loaded: LoadedModel, request: Request) -> Answer:
    sampler, ids = _build_sampler(loaded, request), list[int]()
    while (answer := _finish(loaded, request, ids)) is None:
        logits_NV = sampler.prepare(_clean_logits(loaded, request, ids, 1))
        ids += sampler.choose(logits_NV, [(len(ids), 0)]).token_ids
    return answer


def _decode_blocks(loaded: LoadedModel, request: Request, block_size: int, shift: bool) -> Answer:
    sampler, ids = _build_sampler(loaded, request), list[int]()
    while True:
        size = min(block_size, loaded.config.max_seq_len - len(request.prompt_ids) - len(ids))
        block: list[int | None] = [None] * size
        anchor: int | None = None
        if shift:
            logits_NV = sampler.prepare(_clean_logits(loaded, request, ids, block_size))
            anchor = sampler.choose(logits_NV, [(len(ids), 0)]).token_ids[0]
        if not request.fused_commit:
            block[0] = anchor
        for pass_idx in count():
            if (answer := _finish(loaded, request, ids + _settled(block))) is not None:
                return answer
            masked = _open_places(loaded, block, _limit(loaded, request) - len(ids), first=int(shift))
            if not any(masked) and None not in block[: 1 if shift else 0]:
                break
            logits_SV = sampler.prepare(_block_logits(loaded, request, ids, block, block_size))
            _denoise(request, sampler, logits_SV, block, masked, start=len(ids), pass_idx=pass_idx, shift=shift)
            if pass_idx == 0 and shift:
                block[0] = anchor
        ids += _settled(block)


def _denoise(
    request: Request,
    sampler: Sampler,
    logits_SV: Tensor,
    block: list[int | None],
    masked: list[bool],
    *,
    start: int,
    pass_idx: int,
    shift: bool,
) -> None:
    """Reveal what the policy picks; shifted, the row left of a place predicts it."""
    rows_SV = logits_SV.roll(1, dims=0) if shift else logits_SV
    places = [(start + idx, pass_idx) for idx in range(len(block))]
    choice = sampler.choose(rows_SV, places, entropy=True)
    steps_left = max(1, (request.denoising_steps or len(block)) - pass_idx)
    confidence = [math.exp(logprob) for logprob in choice.logprobs]
    for idx in choose_reveals(
        request.build_policy(), confidence=confidence, entropy=choice.entropies, masked=masked, passes_left=steps_left
    ):
        block[idx] = choice.token_ids[idx]


def _settled(block: list[int | None]) -> list[int]:
    """The revealed tokens before the first mask."""
    return [token_id for token_id in takewhile(lambda token_id: token_id is not None, block) if token_id is not None]


def _open_places(loaded: LoadedModel, block: list[int | None], wanted: int, *, first: int) -> list[bool]:
    """Places that may be revealed: masked, before the limit, and left of any revealed end of turn."""
    ends = [idx for idx, token_id in enumerate(block) if token_id in loaded.tokenizer.eos_token_ids]
    end = min([wanted, *ends])
    return [token_id is None and first <= idx < end for idx, token_id in enumerate(block)]


def _finish(loaded: LoadedModel, request: Request, settled: list[int]) -> Answer | None:
    """The answer, once the settled tokens hold its end; tokens after the end do not matter."""
    for num in range(1, len(settled) + 1):
        is_end = settled[num - 1] in loaded.tokenizer.eos_token_ids
        ids = tuple(settled[: num - 1] if is_end else settled[:num])
        text = loaded.tokenizer.decode(ids)
        is_last = is_end or num == _limit(loaded, request)
        # A text that breaks off inside a character waits for the rest of it.
        found = [] if text.endswith("\ufffd") and not is_last else _find_stops(request, text)
        if found:
            end, negative_len = min(found)
            return ids, text[: end if request.include_stop else end + negative_len], "stop"
        if is_last:
            return ids, text, "stop" if is_end else "length"
    return None


def _find_stops(request: Request, text: str) -> list[tuple[int, int]]:
    return [(text.find(stop) + len(stop), -len(stop)) for stop in request.stop if stop in text]


def _limit(loaded: LoadedModel, request: Request) -> int:
    return min(request.max_tokens, loaded.config.max_seq_len - len(request.prompt_ids))


def _build_sampler(loaded: LoadedModel, request: Request) -> Sampler:
    unknown = range(loaded.tokenizer.vocab_size, loaded.config.vocab_size)
    mask = [loaded.diffusion.mask_token_id] if loaded.diffusion else []
    return Sampler(request, [*unknown, *mask], device=loaded.decoder.embedding.weight.device)


def _clean_logits(loaded: LoadedModel, request: Request, ids: list[int], block_size: int) -> Tensor:
    """Logits at the last clean position, shape (1, V)."""
    return _whole_logits(loaded, request, ids, [], block_size)[-1:]


def _block_logits(
    loaded: LoadedModel, request: Request, ids: list[int], block: list[int | None], block_size: int
) -> Tensor:
    """Logits at the positions of a block that follows `ids`, shape (S, V)."""
    assert loaded.diffusion is not None
    shown = [loaded.diffusion.mask_token_id if token_id is None else token_id for token_id in block]
    return _whole_logits(loaded, request, ids, shown, block_size)[-len(block) :]


def _whole_logits(loaded: LoadedModel, request: Request, ids: list[int], noisy: list[int], block_size: int) -> Tensor:
    """One forward over prompt, clean answer and noisy block under the visibility rule of training."""
    tokens = torch.tensor([*request.prompt_ids, *ids, *noisy], device=loaded.decoder.embedding.weight.device)
    position_idx = torch.arange(len(tokens), device=tokens.device)
    answer_idx = position_idx - len(request.prompt_ids)
    places = TokenPlaces(
        document_idx=torch.zeros_like(tokens),
        stream_idx=(answer_idx >= len(ids)).long(),
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
