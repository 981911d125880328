"""Clears most documents of a blocklist at once: only the others are compared word by word.

A screen never clears a document that the rules would remove, since it looks for the same word runs by hash.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ar2diff.data.gram_hashes import Hashes, WordHashes

Flags = npt.NDArray[np.bool_]
_FILTER_BITS = 22


class GramScreen:
    """The runs of `size` words of some texts, by hash.

    Args:
        texts: normalised, as documents are when they are looked up.
    """

    def __init__(self, texts: Iterable[str], size: int) -> None:
        self._size = size
        self._known: Hashes = np.unique(WordHashes(list(texts)).grams(size)[0])
        # The first look is a bit of the hash's top bits: one load for almost every run of almost every document.
        self._filter = np.zeros(1 << _FILTER_BITS, np.bool_)
        self._filter[self._known >> np.uint64(64 - _FILTER_BITS)] = True

    def flag(self, words: WordHashes) -> Flags:
        """Which texts of `words` share a run with the screen's texts, bool [texts]."""
        flags = np.zeros(len(words.offsets) - 1, np.bool_)
        if not len(self._known):
            return flags
        hashes, offsets = words.grams(self._size)
        places = np.flatnonzero(self._filter[hashes >> np.uint64(64 - _FILTER_BITS)])
        shared = places[np.isin(hashes[places], self._known)]
        flags[np.searchsorted(offsets, shared, side="right") - 1] = True
        return flags


def flag_any(screens: Sequence[GramScreen], words: WordHashes) -> Flags:
    """Which texts share a run with any of the screens."""
    flags = np.zeros(len(words.offsets) - 1, np.bool_)
    for screen in screens:
        flags |= screen.flag(words)
    return flags
