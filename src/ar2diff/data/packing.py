"""Which documents share a row: best fit, longest first; a document is never cut and never split over rows.

A row of L positions takes the longest document left and then, each time, the longest that still fits. Where
documents are long against the row that leaves gaps, so a row's fill is then improved by an exact subset sum
over the lengths that are left.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence

from ar2diff.errors import DataError

# Below this share of filled positions the subset sum is worth its time.
GOOD_FILL = 0.995
MAX_DOCUMENTS_EXACT = 50_000


def pack_documents(lens: Sequence[int], row_len: int) -> list[list[int]]:
    """Indices of the documents of each row; every document is in exactly one row, and equal input gives equal rows.

    Args:
        lens: tokens of each document, from 1 to `row_len`.
        row_len: positions of a row.

    Raises:
        DataError: a document is longer than a row.
    """
    for index, length in enumerate(lens):
        if not 0 < length <= row_len:
            raise DataError(
                f"document {index} has {length} tokens and a row {row_len}",
                fix="Raise row_len, or prepare the data with a lower max_document_len",
            )
    rows = _fill_lengths(lens, row_len, exact=False)
    if lens and len(lens) <= MAX_DOCUMENTS_EXACT and sum(lens) < GOOD_FILL * row_len * len(rows):
        rows = min(rows, _fill_lengths(lens, row_len, exact=True), key=len)
    return _assign_documents(rows, lens)


def _fill_lengths(lens: Sequence[int], row_len: int, *, exact: bool) -> list[list[int]]:
    """The lengths of each row, before anyone says which documents they are."""
    left = Counter(lens)
    distinct = sorted(left)
    rows = []
    while distinct:
        row = [distinct[-1]]
        _take(left, distinct, row[0])
        room = row_len - row[0]
        extra = _best_subset(left, distinct, room) if exact else None
        for length in extra or ():
            _take(left, distinct, length)
            row.append(length)
        while extra is None and (position := bisect.bisect_right(distinct, room)):
            length = distinct[position - 1]
            _take(left, distinct, length)
            row.append(length)
            room -= length
        rows.append(row)
    return rows


def _take(left: Counter[int], distinct: list[int], length: int) -> None:
    left[length] -= 1
    if not left[length]:
        del distinct[bisect.bisect_left(distinct, length)]


def _best_subset(left: Counter[int], distinct: list[int], room: int) -> list[int]:
    """Lengths, each at most as often as it is left, whose sum comes closest to `room` from below.

    Bit s of `reach` says that some choice so far sums to s; `came_by[s]` is the length that first reached s.
    Longer lengths are tried first, so that short ones stay for later rows.
    """
    reach, full = 1, (1 << (room + 1)) - 1
    came_by: dict[int, int] = {}
    for length in reversed(distinct[: bisect.bisect_right(distinct, room)]):
        for _ in range(min(left[length], room // length)):
            fresh = (reach << length) & full & ~reach
            if not fresh:
                break
            reach |= fresh
            while fresh:
                lowest = fresh & -fresh
                came_by[lowest.bit_length() - 1] = length
                fresh ^= lowest
        if reach >> room:
            break
    chosen, total = [], reach.bit_length() - 1
    while total:
        chosen.append(came_by[total])
        total -= came_by[total]
    return chosen


def _assign_documents(rows: list[list[int]], lens: Sequence[int]) -> list[list[int]]:
    waiting: dict[int, list[int]] = defaultdict(list)
    for index in range(len(lens) - 1, -1, -1):
        waiting[lens[index]].append(index)
    return [[waiting[length].pop() for length in row] for row in rows]
