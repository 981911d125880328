"""Clears most documents of a blocklist at once: only the others are compared word by word.

A screen never clears a document that the rules would remove, since it looks for the same word runs by hash.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ar2diff.data.gram_hashes import Hashes, WordHashes

Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
ShortHashes = npt.NDArray[np.uint32]
T = TypeVar("T", np.uint32, np.uint64)
_MAX_FILTER_BITS = 22


def _shorten(hashes: Hashes) -> ShortHashes:
    return (hashes >> np.uint64(32)).astype(np.uint32)


class HashIndex(Generic[T]):
    """Sorted, different hashes that almost all look-ups miss: one load settles most of them.

    Args:
        known: uint32 or uint64 [n].
    """

    def __init__(self, known: npt.NDArray[T]) -> None:
        self.known: npt.NDArray[T] = known
        # The first look is a bit of the hash's top bits.
        num_bits = min(_MAX_FILTER_BITS, len(known).bit_length() + 6)
        self._shift: T = known.dtype.type(8 * known.dtype.itemsize - num_bits)
        self._filter = np.zeros(1 << num_bits, np.bool_)
        self._filter[known >> self._shift] = True

    def find(self, hashes: npt.NDArray[T]) -> tuple[Places, Places]:
        """Which of `hashes` are known, and their places among the known, both int64."""
        places = np.flatnonzero(self._filter[hashes >> self._shift])
        if not len(places):
            return places, places
        nearest = np.minimum(np.searchsorted(self.known, hashes[places]), len(self.known) - 1)
        is_known = self.known[nearest] == hashes[places]
        return places[is_known], nearest[is_known]


class GramScreen:
    """The runs of `size` words of some texts, by hash.

    Args:
        known: their hashes' upper halves, sorted.
    """

    def __init__(self, known: ShortHashes, size: int) -> None:
        self._size = size
        self._index = HashIndex(known)

    @property
    def known(self) -> ShortHashes:
        """The hashes' upper halves, sorted."""
        known: ShortHashes = self._index.known
        return known

    @classmethod
    def of_texts(cls, texts: Iterable[str], size: int) -> "GramScreen":
        """The screen of texts that are normalised as documents are when they are looked up."""
        return cls(np.unique(_shorten(WordHashes(list(texts)).grams(size)[0])), size)

    def flag(self, words: WordHashes) -> Flags:
        """Which texts of `words` share a run with the screen's texts, bool [texts]."""
        flags = np.zeros(len(words.offsets) - 1, np.bool_)
        hashes, offsets = words.grams(self._size)
        shared, _ = self._index.find(_shorten(hashes))
        flags[np.searchsorted(offsets, shared, side="right") - 1] = True
        return flags


def flag_any(screens: Sequence[GramScreen], words: WordHashes) -> Flags:
    """Which texts share a run with any of the screens."""
    flags = np.zeros(len(words.offsets) - 1, np.bool_)
    for screen in screens:
        flags |= screen.flag(words)
    return flags
