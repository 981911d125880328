"""Which documents share a row; a document is never cut and never split over rows.

Rows are mixed: a row of nothing but one source's documents, or of one length, has a loss of another scale than its
neighbours. Documents come in an order that spreads the sources. A row takes the next ones, and then, out of a window
of those that follow, the choice that fills it best (an exact subset sum). Where documents are so long against the row
that this leaves gaps, all are packed by best fit, longest first, which fills best and mixes least.
"""

import bisect
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import islice

from ar2diff.errors import DataError

# Below this share of filled positions the subset sum is worth its time.
GOOD_FILL = 0.995
MAX_DOCUMENTS_EXACT = 50_000
# Mixing may cost this share of rows more than best fit needs.
MIXING_COST = 0.01
# Documents that a row's last places are chosen from.
WINDOW = 64
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


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
    densest, mixed = _pack_longest(lens, row_len), _pack_mixed(lens, row_len)
    return mixed if len(mixed) <= (1 + MIXING_COST) * len(densest) else densest


def _pack_mixed(lens: Sequence[int], row_len: int) -> list[list[int]]:
    """Rows of neighbours in an order that takes documents evenly from the whole shard."""
    # Sources lie one behind the other in a shard; golden steps visit all of them in turn.
    queue = deque(sorted(range(len(lens)), key=lambda index: index * _GOLDEN % 1.0))
    choose = _best_subset if len(lens) <= MAX_DOCUMENTS_EXACT else _longest_subset
    # Room for two documents leaves the choice something to choose.
    reserve = 2 * sum(lens) // max(len(lens), 1)
    rows: list[list[int]] = []
    while queue:
        row = [queue.popleft()]
        room = row_len - lens[row[0]]
        while queue and room - lens[queue[0]] >= reserve:
            room -= lens[queue[0]]
            row.append(queue.popleft())
        left = Counter(lens[index] for index in islice(queue, WINDOW))
        row += _take_first(queue, Counter(choose(left, sorted(left), room)), lens)
        rows.append(row)
    return rows


def _take_first(queue: deque[int], wanted: Counter[int], lens: Sequence[int]) -> list[int]:
    """Take documents of the wanted lengths out of the window, the first ones of each."""
    taken, kept = [], []
    while wanted.total():
        index = queue.popleft()
        if wanted[lens[index]]:
            wanted[lens[index]] -= 1
            taken.append(index)
        else:
            kept.append(index)
    queue.extendleft(reversed(kept))
    return taken


def _pack_longest(lens: Sequence[int], row_len: int) -> list[list[int]]:
    """Best fit, longest first; where documents are long against the row, by a subset sum over all that are left."""
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


def _longest_subset(left: Counter[int], distinct: list[int], room: int) -> list[int]:
    """The longest length that fits, again and again."""
    chosen = []
    while position := bisect.bisect_right(distinct, room):
        length = distinct[position - 1]
        count = min(left[length], room // length)
        chosen += [length] * count
        room -= count * length
        distinct = distinct[: position - 1]
    return chosen


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
