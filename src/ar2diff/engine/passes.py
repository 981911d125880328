"""Forward passes for what decoding loops ask: one for all requests that run, each at its own place.

Rows of all requests share the linear layers; attention is each request's own, over its own cache.
Shape letters: L rows of a forward, E model dim, V vocabulary.
"""

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from ar2diff.attention.kv_cache import CacheAttend, JoinedAttend, PagedCache
from ar2diff.engine.ask import Ask, ForwardAsk, LogitsAsk
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

    def forward(self, asks: Sequence[tuple[ForwardAsk, PagedCache]]) -> list[Tensor]:
        """One forward for all; the hidden states of each, shape (L of the ask, E)."""
        ids, positions, gate, parts = list[int](), list[int](), list[bool](), list[tuple[int, CacheAttend]]()
        for idx, (ask, cache) in enumerate(asks):
            is_last = idx == len(asks) - 1
            padding = self._count_padding(asks) if is_last else 0
            ids += _list_ids(ask, padding)
            positions += _list_positions(ask, cache.length, padding)
            gate += [False] * len(ask.clean) + [True] * (ask.num_rows - len(ask.clean) + padding)
            parts.append((ask.num_rows + padding, cache.attend_with(self._build_mask(ask, padding))))
        device = self._runner.device
        hidden: Tensor = self._runner(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            parts[0][1] if len(parts) == 1 else JoinedAttend(parts),
            torch.tensor(gate, device=device) if self._runner.has_gate and any(gate) else None,
        )
        pieces = torch.split(hidden, [length for length, _ in parts])
        return [piece[: ask.num_rows] for piece, (ask, _) in zip(pieces, asks, strict=True)]

    def logits(self, asks: Sequence[LogitsAsk]) -> list[Tensor]:
        """One product with the head for all; the logits of each, shape (N of the ask, V)."""
        if len(asks) == 1:
            return [self._runner.logits(asks[0].hidden_NE)]
        logits_NV = self._runner.logits(torch.cat([ask.hidden_NE for ask in asks]))
        return list(torch.split(logits_NV, [len(ask.hidden_NE) for ask in asks]))

    def run_alone(self, asks: Generator[Ask, Tensor, T], cache: PagedCache) -> T:
        """The value of a generator that asks, after all that it asks has run."""
        result: Tensor | None = None
        while True:
            try:
                ask = next(asks) if result is None else asks.send(result)
            except StopIteration as end:
                value: T = end.value
                return value
            result = self.forward([(ask, cache)])[0] if isinstance(ask, ForwardAsk) else self.logits([ask])[0]

    def _count_padding(self, asks: Sequence[tuple[ForwardAsk, PagedCache]]) -> int:
        if all(ask.is_prefill for ask, _ in asks):
            return 0
        return -sum(ask.num_rows for ask, _ in asks) % self._row_multiple

    def _build_mask(self, ask: ForwardAsk, padding: int) -> Tensor | None:
        shape = tuple((seen, len(group_ids)) for seen, group_ids in ask.groups)
        return build_pass_mask(len(ask.clean), shape, padding, ask.clean_is_block, self._runner.device)


def _list_ids(ask: ForwardAsk, padding: int) -> list[int]:
    ids = list(ask.clean)
    for _, group_ids in ask.groups:
        ids += group_ids
    return ids + ids[-1:] * padding


def _list_positions(ask: ForwardAsk, start: int, padding: int) -> list[int]:
    positions = list(range(start, start + len(ask.clean)))
    for seen, group_ids in ask.groups:
        positions += range(start + seen, start + seen + len(group_ids))
    return positions + positions[-1:] * padding


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
