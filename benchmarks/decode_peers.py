"""Block samplers as other projects' public code runs them, restated over a plain `transformers` model.

What is kept of each is its cost: what it computes again, what it copies, what it caches. All use the same weights,
block, passes and reveal rule here, so only the sampler differs.

- `prefix_again`: every pass runs prefix and block from the start, without a cache (dLLM's BD3LM sampler).
- `copied_cache`: every denoising pass works on a copy of the prefix cache (SDAR's generate).
- `block_cache`: the block is taken by halves; the other half's keys are kept between passes (Fast-dLLM v2).
"""

import copy
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass
class Sampled:
    """An answer and what it cost; `first_s` is when its first token was known."""

    start_s: float = field(default_factory=time.perf_counter)
    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    num_forwards: int = 0

    def note_first(self) -> None:
        """Keep the time of the first token."""
        self.first_s = self.first_s or time.perf_counter() - self.start_s


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and how it is sampled."""

    model: Any
    mask_id: int
    end_ids: frozenset[int]
    block_size: int
    steps: int
    max_tokens: int


def run_model(
    setting: Setting, out: Sampled, ids: list[int], cache: DynamicCache | None, first_position: int
) -> Tensor:
    """Logits (L, V) of rows that see the cache and each other."""
    seen = cache.get_seq_length() if cache is not None else 0
    out.num_forwards += 1
    return _logits(setting, ids, cache, first_position, torch.zeros(1, 1, len(ids), seen + len(ids)))


def commit(setting: Setting, out: Sampled, ids: list[int], cache: DynamicCache) -> int:
    """Take clean tokens into the cache, causally; returns the token that their last row predicts."""
    seen = cache.get_seq_length()
    mask = torch.full((len(ids), seen + len(ids)), float("-inf")).triu(seen + 1)[None, None]
    out.num_forwards += 1
    return int(choose(setting, _logits(setting, ids, cache, seen, mask)[-1:])[0][0])


def _logits(
    setting: Setting, ids: list[int], cache: DynamicCache | None, first_position: int, mask: Tensor
) -> Tensor:
    positions = torch.arange(first_position, first_position + len(ids))[None]
    found = setting.model(
        input_ids=torch.tensor([ids]),
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=cache is not None,
    )
    logits: Tensor = found.logits[0]
    return logits


def choose(setting: Setting, logits_NV: Tensor) -> tuple[list[int], list[float]]:
    """The most likely token of each row and its probability."""
    logits_NV[:, setting.mask_id] = float("-inf")
    best = logits_NV.softmax(dim=-1).max(dim=-1)
    return best.indices.tolist(), best.values.tolist()


def reveal(setting: Setting, block: list[int], places: list[int], rows_NV: Tensor, passes_left: int) -> None:
    """Reveal the most confident share of the masked `places`; `rows_NV` are the rows that predict them."""
    ids, confidences = choose(setting, rows_NV)
    count = math.ceil(len(places) / max(1, passes_left))
    for idx in sorted(range(len(places)), key=lambda i: -confidences[i])[:count]:
        block[places[idx]] = ids[idx]


def masked_places(setting: Setting, block: list[int], first: int, last: int) -> list[int]:
    """Masked places of a block from `first` to before `last`."""
    return [place for place in range(first, last) if block[place] == setting.mask_id]


def prefix_again(setting: Setting, prompt: list[int], out: Sampled) -> Sampled:
    """No cache at all."""
    while not is_done(setting, out):
        clean, block = prompt + out.token_ids, [setting.mask_id] * setting.block_size
        seen, size = len(clean), setting.block_size
        mask = torch.full((seen + size, seen + size), float("-inf")).triu(1)
        mask[seen:, seen:] = 0.0
        for step in range(setting.steps):
            if not (places := masked_places(setting, block, 0, size)):
                break
            out.num_forwards += 1
            logits = _logits(setting, clean + block, None, 0, mask[None, None])
            reveal(setting, block, places, logits[[seen + place - 1 for place in places]], setting.steps - step)
            out.note_first()
        out.token_ids += block
    return trim(setting, out)


def copied_cache(setting: Setting, prompt: list[int], out: Sampled) -> Sampled:
    """A copy of the prefix cache for every pass, and a pass to commit each block."""
    cache = DynamicCache()
    anchor = commit(setting, out, prompt, cache)
    out.note_first()
    while True:
        block = [anchor] + [setting.mask_id] * (setting.block_size - 1)
        for step in range(setting.steps):
            if not (places := masked_places(setting, block, 1, setting.block_size)):
                break
            logits = run_model(setting, out, block, copy.deepcopy(cache), cache.get_seq_length())
            reveal(setting, block, places, logits[[place - 1 for place in places]], setting.steps - step)
        out.token_ids += block
        if is_done(setting, out):
            return trim(setting, out)
        anchor = commit(setting, out, block, cache)


def block_cache(setting: Setting, prompt: list[int], out: Sampled) -> Sampled:
    """Halves of a block: the first pass of a half runs the block, later ones run the half over kept keys."""
    cache, half = DynamicCache(), max(1, setting.block_size // 2)
    anchor = commit(setting, out, prompt, cache)
    out.note_first()
    while True:
        block = [anchor] + [setting.mask_id] * (setting.block_size - 1)
        for first in range(0, setting.block_size, half):
            denoise_half(setting, out, block, cache, first, min(first + half, setting.block_size))
        out.token_ids += block
        if is_done(setting, out):
            return trim(setting, out)
        anchor = commit(setting, out, block, cache)


def denoise_half(
    setting: Setting, out: Sampled, block: list[int], cache: DynamicCache, first: int, last: int
) -> None:
    """All passes of one half of a block; the prefix cache is left as it was."""
    seen, steps = cache.get_seq_length(), max(1, setting.steps // 2)
    kept = DynamicCache()
    row = torch.empty(0)
    for step in range(steps):
        if not (places := masked_places(setting, block, max(first, 1), last)):
            break
        if step == 0:
            logits = run_model(setting, out, block, cache, seen)
            # The row left of the half predicts its first place; it is of the other half.
            row, rows = logits[max(first - 1, 0)].clone(), logits[[place - 1 for place in places]]
            kept = drop_keys(cache, seen + first, seen + last)
            cache.crop(-len(block))
        else:
            own = run_model(setting, out, block[first:last], kept, seen + first)
            kept.crop(first - last)
            rows = torch.stack([own[place - first - 1] if place > first else row for place in places])
        reveal(setting, block, places, rows, steps - step)


def drop_keys(cache: DynamicCache, first: int, last: int) -> DynamicCache:
    """A cache without the keys of some places; a key carries its position, so order does not matter."""
    kept = DynamicCache()
    for idx, layer in enumerate(cache.layers):
        keys, values = (torch.cat((x[:, :, :first], x[:, :, last:]), dim=2) for x in (layer.keys, layer.values))
        kept.update(keys, values, idx)
    return kept


def is_done(setting: Setting, out: Sampled) -> bool:
    """Whether an end of turn or the limit is reached."""
    return len(out.token_ids) >= setting.max_tokens or bool(setting.end_ids & set(out.token_ids))


def trim(setting: Setting, out: Sampled) -> Sampled:
    """Cut at the end of turn and at the limit."""
    ends = [idx for idx, token_id in enumerate(out.token_ids) if token_id in setting.end_ids]
    out.token_ids = out.token_ids[: min([setting.max_tokens, *ends])]
    return out


PEERS = {"prefix_again": prefix_again, "copied_cache": copied_cache, "block_cache": block_cache}
