"""Hashes of word runs for many texts at once: what near-duplicate search and the blocklist screen compare first.

The hashes are the same in any process and on any machine. They only find candidates: equal hashes are always
followed by a comparison of the words, or of 64-bit hash sets as a whole. N words of all texts together.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ar2diff.data.normalize import mask_text

Hashes = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]

# Odd, so that multiplying by it loses nothing modulo 2^64.
_BASE = np.uint64(0x9E3779B97F4A7C15)
_SPACE, _NEWLINE = ord(" "), ord("\n")
# Bytes hashed at once: the work arrays stay in the cache, and there are few of them.
_PIECE_LEN = 1 << 17
_CHUNK_LEN = 8
# Keeps the first n bytes of a little-endian chunk.
_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(_CHUNK_LEN + 1)], np.uint64)


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
        # A space ends a word and a newline a text: normalised texts have no other white space.
        self.hashes, borders = _hash_words("\n".join(text for text in texts if text), masked)
        counts = np.zeros(len(texts), np.int64)
        counts[[place for place, text in enumerate(texts) if text]] = np.diff(borders)
        self.offsets: Offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

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


def _hash_words(text: str, masked: bool) -> tuple[Hashes, Offsets]:
    """One hash for each word of non-empty texts that newlines separate, and where the words of each text begin."""
    if masked and not text.isascii():
        text, masked = mask_text(text), False
    hashes, borders, num_words = [np.zeros(0, np.uint64)], [np.zeros(1, np.int64)], 0
    for piece in _cut(text.encode()):
        codes = np.frombuffer(piece, np.uint8)
        codes = _mask_digits(codes) if masked else codes
        ends = np.flatnonzero((codes == _SPACE) | (codes == _NEWLINE))
        borders.append(np.flatnonzero(codes[ends] == _NEWLINE) + (num_words + 1))
        hashes.append(_hash_piece(codes, ends))
        num_words += len(ends) + 1
    return np.concatenate(hashes), np.concatenate([*borders, np.array([num_words] if text else [], np.int64)])


def _cut(text: bytes) -> Iterator[bytes]:
    """Pieces of about `_PIECE_LEN` bytes that end at a space, which belongs to none."""
    start = 0
    while start < len(text):
        end = text.find(b" ", start + _PIECE_LEN)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def _mask_digits(codes: Codes) -> Codes:
    """`mask_text` of ASCII text; a regular expression takes longer."""
    is_digit = (codes - np.uint8(ord("0"))) < 10
    goes_on = np.zeros_like(is_digit)
    np.logical_and(is_digit[1:], is_digit[:-1], out=goes_on[1:])
    return np.where(is_digit, np.uint8(ord("0")), codes)[~goes_on]


def _hash_piece(codes: Codes, ends: Offsets) -> Hashes:
    """A word's first eight bytes as one number, its further ones added in the manner of a polynomial, then mixed.

    Args:
        ends: where each word but the last ends.
    """
    starts = np.concatenate([np.zeros(1, np.int64), ends + 1])
    lens = np.append(ends, len(codes)) - starts
    padded = np.concatenate([codes, np.zeros(_CHUNK_LEN, np.uint8)])
    # Eight bytes from any place on: a view, not a copy.
    chunks: Hashes = np.ndarray(len(codes) + 1, "<u8", padded, strides=(1,))
    values = chunks[starts] & _MASKS[np.minimum(lens, _CHUNK_LEN)]
    long = np.flatnonzero(lens > _CHUNK_LEN)
    if len(long):
        values[long] += _sum_further(chunks, starts[long], lens[long])
    return mix(values)


def _sum_further(chunks: Hashes, starts: Offsets, lens: Offsets) -> Hashes:
    """Of words of more than eight bytes: the sum of the chunks after the first, each by its power of the base."""
    counts = (lens - 1) // _CHUNK_LEN
    firsts = np.cumsum(counts) - counts
    steps = np.arange(counts.sum()) - np.repeat(firsts, counts) + 1
    values = chunks[np.repeat(starts, counts) + _CHUNK_LEN * steps]
    values &= _MASKS[np.minimum(np.repeat(lens, counts) - _CHUNK_LEN * steps, _CHUNK_LEN)]
    powers = np.cumprod(np.full(int(counts.max()) + 1, _BASE), dtype=np.uint64)
    return np.add.reduceat(values * powers[steps], firsts)
