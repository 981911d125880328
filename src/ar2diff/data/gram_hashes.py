"""Hashes of word runs for many texts at once: what near-duplicate search and the blocklist screen compare first.

The hashes are the same in any process and on any machine. They only find candidates: equal hashes are always
followed by a comparison of the words, or of 64-bit hash sets as a whole. N words of all texts together.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ar2diff.data.normalize import mask_text

Hashes = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]

# Odd, so that multiplying by a power of it loses nothing modulo 2^64.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_SPACE = 32
_PIECE_LEN = 1 << 15


def mix(values: Hashes) -> Hashes:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class WordHashes:
    """The words of several texts as 64-bit hashes.

    Args:
        texts: words joined by single spaces, as `normalize_text` gives them.
        masked: hash them as if each run of digits were `0`, as `mask_text` writes them.

    Attributes:
        hashes: uint64 [N].
        offsets: int64 [texts + 1], where the words of each text begin.
    """

    def __init__(self, texts: Sequence[str], *, masked: bool = False) -> None:
        counts = np.array([text.count(" ") + 1 if text else 0 for text in texts], dtype=np.int64)
        self.offsets: Offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.hashes = _hash_words(" ".join(text for text in texts if text), masked)

    def grams(self, size: int) -> tuple[Hashes, Offsets]:
        """The hashes of all runs of `size` words that stay within a text, and where each text's begin."""
        lens = np.maximum(np.diff(self.offsets) - (size - 1), 0)
        offsets: Offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lens)])
        if not offsets[-1]:
            return np.zeros(0, np.uint64), offsets
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1] - offsets[:-1], lens)
        runs = len(self.hashes) - (size - 1)
        sums = np.zeros(runs, np.uint64)
        for step in range(size):
            sums *= _BASE
            sums += self.hashes[step : step + runs]
        return mix(sums[places]), offsets


def _hash_words(text: str, masked: bool) -> Hashes:
    """One hash for each space-separated word: a polynomial of its code points, then mixed."""
    pieces = [_hash_piece(_read_codes(piece, masked)) for piece in _cut(text)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.uint64)


def _cut(text: str) -> Iterator[str]:
    """Pieces of about `_PIECE_LEN` characters that end where words end, so that work arrays stay in the cache."""
    start = 0
    while start < len(text):
        end = text.find(" ", start + _PIECE_LEN)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def _read_codes(text: str, masked: bool) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint32]:
    """The code points of `text`; digits of ASCII are masked here, since a regular expression takes longer."""
    if not text.isascii():
        return np.frombuffer((mask_text(text) if masked else text).encode("utf-32-le"), dtype="<u4")
    codes = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    if not masked:
        return codes
    is_digit = (codes - np.uint8(ord("0"))) < 10
    goes_on = np.zeros_like(is_digit)
    np.logical_and(is_digit[1:], is_digit[:-1], out=goes_on[1:])
    return np.where(is_digit, np.uint8(ord("0")), codes)[~goes_on]


def _hash_piece(codes: npt.NDArray[np.uint8] | npt.NDArray[np.uint32]) -> Hashes:
    spaces = np.flatnonzero(codes == _SPACE)
    starts = np.concatenate([np.zeros(1, np.int64), spaces + 1])
    ups, downs = _powers(1 << max(len(codes) - 1, 1).bit_length())
    values = codes.astype(np.uint64)
    values[spaces] = 0
    values *= ups[: len(codes)]
    # Dividing by the power at the word's start makes the hash independent of its place.
    return mix(np.add.reduceat(values, starts) * downs[starts])


@lru_cache(maxsize=4)
def _powers(size: int) -> tuple[Hashes, Hashes]:
    """The powers 0 to `size - 1` of the base and of its inverse modulo 2^64."""
    inverse = np.uint64(pow(int(_BASE), -1, 1 << 64))
    ups: Hashes = np.cumprod(np.full(size, _BASE), dtype=np.uint64) * inverse
    downs: Hashes = np.cumprod(np.full(size, inverse), dtype=np.uint64) * _BASE
    return ups, downs
