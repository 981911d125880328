"""Which earlier documents have a given 64-bit key: an index whose memory does not grow with the data.

New keys are collected in memory; each time there are `RUN_LEN` of them they are sorted and written as one run,
which is mapped afterwards. A look-up is a binary search in every run.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ar2diff.data.gram_hashes import Hashes

Numbers = npt.NDArray[np.int64]

RUN_LEN = 1 << 21
# A key that more documents share is common wording; the oldest ones stand for it.
MAX_PER_KEY = 64


class KeyIndex:
    """Keys and the numbers of their documents, which must be added in ascending order of the numbers.

    Args:
        folder: for the runs; whoever made it removes it.
        run_len: keys of a run, of 16 bytes each.
    """

    def __init__(self, folder: Path, *, run_len: int = RUN_LEN) -> None:
        self._folder = folder
        self._run_len = run_len
        self._runs: list[tuple[Hashes, Numbers]] = []
        self._fresh: list[tuple[Hashes, Numbers]] = []
        self._fresh_len = 0

    def add(self, keys: Hashes, numbers: Numbers) -> None:
        """Remember that document `numbers[i]` has the key `keys[i]`."""
        if not len(keys):
            return
        self._fresh.append(_sorted(keys, numbers))
        self._fresh_len += len(keys)
        if self._fresh_len >= self._run_len:
            self._write_run()
        elif len(self._fresh) > 16:
            self._fresh = [_join(self._fresh)]

    def _write_run(self) -> None:
        path = self._folder / f"run-{len(self._runs):05d}.npy"
        keys, numbers = _join(self._fresh)
        np.save(path, np.stack([keys, numbers.astype(np.uint64)]))
        mapped = np.load(path, mmap_mode="r")
        self._runs.append((mapped[0], mapped[1].view(np.int64)))
        self._fresh, self._fresh_len = [], 0

    def find(self, keys: Hashes) -> tuple[Numbers, Numbers]:
        """Pairs (place in `keys`, earlier document with that key), by place and then by document.

        Of a key that many documents share only the first `MAX_PER_KEY` are given.
        """
        places, found = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        room = np.full(len(keys), MAX_PER_KEY, np.int64)
        # In ascending order neighbouring searches touch the same memory.
        ascending = np.argsort(keys, kind="stable")
        for run_keys, run_numbers in (*self._runs, *self._fresh):
            known, first, lens = _find_known(run_keys, keys[ascending])
            known = ascending[known]
            lens = np.minimum(lens, room[known])
            room[known] -= lens
            steps = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
            places.append(np.repeat(known, lens))
            found.append(np.asarray(run_numbers[np.repeat(first, lens) + steps]))
        all_places, all_found = np.concatenate(places), np.concatenate(found)
        order = np.lexsort((all_found, all_places))
        return all_places[order], all_found[order]


def _find_known(run: Hashes, keys: Hashes) -> tuple[Numbers, Numbers, Numbers]:
    """Which of `keys` a run holds, where each begins in it, and how often it comes; almost none is held."""
    first = np.searchsorted(run, keys, side="left")
    known = np.flatnonzero(run[np.minimum(first, len(run) - 1)] == keys)
    return known, first[known], np.searchsorted(run, keys[known], side="right") - first[known]


def _sorted(keys: Hashes, numbers: Numbers) -> tuple[Hashes, Numbers]:
    order = np.argsort(keys, kind="stable")
    return keys[order], numbers[order]


def _join(pieces: list[tuple[Hashes, Numbers]]) -> tuple[Hashes, Numbers]:
    return _sorted(np.concatenate([keys for keys, _ in pieces]), np.concatenate([numbers for _, numbers in pieces]))
