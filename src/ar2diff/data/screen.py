"""Clears most documents of a blocklist at once: only the others are compared word by word.

A screen never clears a document that the rules would remove, since it looks for the same word runs by hash.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ar2diff.data.gram_hashes import Hashes, WordHashes

Flags = npt.NDArray[np.bool_]
ShortHashes = npt.NDArray[np.uint32]
_MAX_FILTER_BITS = 22


def _shorten(hashes: Hashes) -> ShortHashes:
    return (hashes >> np.uint64(32)).astype(np.uint32)


class GramScreen:
    """The runs of `size` words of some texts, by hash.

    Args:
        known: their hashes' upper halves, sorted.
    """

    def __init__(self, known: ShortHashes, size: int) -> None:
        self._size = size
        self.known: ShortHashes = known
        # The first look is a bit of the hash's top bits: one load for almost every run of almost every document.
        self._shift = np.uint32(32 - min(_MAX_FILTER_BITS, len(known).bit_length() + 6))
        self._filter = np.zeros(1 << (32 - int(self._shift)), np.bool_)
        self._filter[known >> self._shift] = True

    @classmethod
    def of_texts(cls, texts: Iterable[str], size: int) -> "GramScreen":
        """The screen of texts that are normalised as documents are when they are looked up."""
        return cls(np.unique(_shorten(WordHashes(list(texts)).grams(size)[0])), size)

    def flag(self, words: WordHashes) -> Flags:
        """Which texts of `words` share a run with the screen's texts, bool [texts]."""
        flags = np.zeros(len(words.offsets) - 1, np.bool_)
        if not len(self.known):
            return flags
        hashes, offsets = words.grams(self._size)
        short = _shorten(hashes)
        places = np.flatnonzero(self._filter[short >> self._shift])
        nearest = np.minimum(np.searchsorted(self.known, short[places]), len(self.known) - 1)
        shared = places[self.known[nearest] == short[places]]
        flags[np.searchsorted(offsets, shared, side="right") - 1] = True
        return flags


def flag_any(screens: Sequence[GramScreen], words: WordHashes) -> Flags:
    """Which texts share a run with any of the screens."""
    flags = np.zeros(len(words.offsets) - 1, np.bool_)
    for screen in screens:
        flags |= screen.flag(words)
    return flags
