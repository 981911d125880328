"""Which evaluation items a prompt is similar to, where words were replaced all through it.

Comparing every prompt with every item takes too long, so two rare runs of four words in common make a candidate:
that is one run of five, or what is left of a copy with every fifth word replaced. The similarity is then measured.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rapidfuzz import fuzz

from ar2diff.data.gram_hashes import Hashes, WordHashes
from ar2diff.data.normalize import iterate_grams
from ar2diff.data.screen import HashIndex

RUN_LEN = 4
MIN_SHARED = 2
MIN_RATIO = 75.0
# A run that more items have is common wording and points to none of them.
MAX_ITEMS_PER_RUN = 128

Numbers = npt.NDArray[np.int64]


class SimilarItems:
    """A fixed list of items.

    Args:
        prompts: as `normalize_text` gives them.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = list(prompts)
        runs, self._offsets, self._items = _index_runs(self._prompts)
        self._index = HashIndex(runs)

    def find_all(self, texts: Sequence[str]) -> dict[int, int]:
        """For normalised prompts: the first item each is similar to, by place; others are left out."""
        found: dict[int, int] = {}
        for place, index in zip(*self._find_candidates(texts), strict=True):
            if place not in found and fuzz.ratio(texts[place], self._prompts[index], score_cutoff=MIN_RATIO):
                found[int(place)] = int(index)
        return found

    def _find_candidates(self, texts: Sequence[str]) -> tuple[Numbers, Numbers]:
        """Pairs (place of a text, item) that share `MIN_SHARED` runs, by place and then by item."""
        hashes, borders = WordHashes(texts).grams(RUN_LEN)
        shared, runs = self._index.find(hashes)
        lens = self._offsets[runs + 1] - self._offsets[runs]
        steps = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
        items = self._items[np.repeat(self._offsets[runs], lens) + steps]
        places = np.repeat(np.searchsorted(borders, shared, side="right") - 1, lens)
        pairs, counts = np.unique(places * len(self._prompts) + items, return_counts=True)
        return np.divmod(pairs[counts >= MIN_SHARED], max(len(self._prompts), 1))

    def first_run(self, text: str, index: int) -> str:
        """The first run of words that `text` has in common with an item; for the record."""
        known = set(iterate_grams(self._prompts[index].split(" "), RUN_LEN))
        return " ".join(next((run for run in iterate_grams(text.split(" "), RUN_LEN) if run in known), ()))


def _index_runs(prompts: Sequence[str]) -> tuple[Hashes, Numbers, Numbers]:
    """All different runs sorted by hash, where the items of each begin, and these items."""
    hashes, offsets = WordHashes(prompts).grams(RUN_LEN)
    items = np.repeat(np.arange(len(prompts)), np.diff(offsets))
    order = np.lexsort((items, hashes))
    hashes, items = hashes[order], items[order]
    fresh = np.ones(len(hashes), np.bool_)
    fresh[1:] = (hashes[1:] != hashes[:-1]) | (items[1:] != items[:-1])
    hashes, items = hashes[fresh], items[fresh]
    runs, counts = np.unique(hashes, return_counts=True)
    is_rare = counts <= MAX_ITEMS_PER_RUN
    items = items[np.repeat(is_rare, counts)]
    return runs[is_rare], np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[is_rare])]), items
