"""Forward passes for what decoding loops ask: rows, positions and who sees whom.

Shape letters: L rows of a forward, E model dim, V vocabulary.
"""

from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from ar2diff.attention.kv_cache import KVCache
from ar2diff.engine.ask import Ask, ForwardAsk
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.precision import AnyRunner

T = TypeVar("T")


class PassRunner:
    """Runs asks on a runner.

    Args:
        config: its `row_multiple` fills up counted forwards where rows are not independent.
    """

    def __init__(self, runner: AnyRunner, config: EngineConfig) -> None:
        self._runner = runner
        self._row_multiple = 1 if runner.rows_are_independent else config.row_multiple

    def run(self, ask: Ask, cache: KVCache) -> Tensor:
        """The result that the ask's docstring promises."""
        if isinstance(ask, ForwardAsk):
            return self._forward(ask, cache)
        return self._runner.logits(ask.hidden_NE)

    def run_all(self, asks: Generator[Ask, Tensor, T], cache: KVCache) -> T:
        """The value of a generator that asks, after all that it asks has run."""
        result: Tensor | None = None
        while True:
            try:
                ask = next(asks) if result is None else asks.send(result)
            except StopIteration as end:
                value: T = end.value
                return value
            result = self.run(ask, cache)

    def _forward(self, ask: ForwardAsk, cache: KVCache) -> Tensor:
        ids, start = list(ask.clean), cache.length
        positions = list(range(start, start + len(ids)))
        for seen, group_ids in ask.groups:
            ids += group_ids
            positions += range(start + seen, start + seen + len(group_ids))
        padding = 0 if ask.is_prefill else -len(ids) % self._row_multiple
        ids += ids[-1:] * padding
        positions += positions[-1:] * padding
        shape = tuple((seen, len(group_ids)) for seen, group_ids in ask.groups)
        mask_LL = build_pass_mask(len(ask.clean), shape, padding, ask.clean_is_block, self._runner.device)
        hidden: Tensor = self._runner(
            torch.tensor(ids, device=self._runner.device),
            torch.tensor(positions, device=self._runner.device),
            cache.attend_with(mask_LL),
        )
        return hidden


@lru_cache(maxsize=256)
def build_pass_mask(
    num_clean: int, groups: tuple[tuple[int, int], ...], padding: int, clean_is_block: bool, device: torch.device
) -> Tensor | None:
    """Who sees whom among a pass's rows, boolean (L, L); None where all see all.

    Args:
        groups: for each, how many clean rows it sees and its size.
        padding: rows at the end that nobody sees.
    """
    length = num_clean + sum(size for _, size in groups) + padding
    mask_LL = torch.zeros(length, length, dtype=torch.bool, device=device)
    clean = torch.ones(num_clean, num_clean, dtype=torch.bool, device=device)
    mask_LL[:num_clean, :num_clean] = clean if clean_is_block else clean.tril()
    first = num_clean
    for seen, size in groups:
        mask_LL[first : first + size, :seen] = True
        mask_LL[first : first + size, first : first + size] = True
        first += size
    mask_LL[first:, first:] = True
    return None if bool(mask_LL.all()) else mask_LL
