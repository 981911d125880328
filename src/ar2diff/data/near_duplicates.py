"""Signatures that find documents which are almost the same: MinHash over runs of five words, in bands.

128 permutations (rensa) in 16 bands of 8: two documents with a Jaccard similarity of 0.8 share a band in 94.7% of
cases, with 0.9 in 99.99% (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, section 3.4). Sharing a band
only makes a pair a candidate: what is removed has a measured similarity of at least `MIN_JACCARD`.
Compared is the whole document without system turns, so that a long common instruction alone makes no repeat.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rensa import RMinHash

from ar2diff.data.gram_hashes import Hashes, Offsets, WordHashes, mix

NEAR_POLICY = "minhash-v1"
SHINGLE_LEN = 5
NUM_PERMUTATIONS = 128
NUM_BANDS = 16
BAND_LEN = NUM_PERMUTATIONS // NUM_BANDS
MIN_JACCARD = 0.8
_SEED = 42
# Documents signed at once: rensa gives its numbers as Python objects, and so many of them stay in the cache.
_CHUNK = 512


class Signatures(NamedTuple):
    """Of n documents.

    Args:
        band_keys: uint64 [n, 16]; equal keys in a column make two documents candidates.
        shingles: uint64, the hashes of all word runs of all documents; those of a document may repeat.
        offsets: int64 [n + 1], where each document's shingles begin; a document without any is never compared.
    """

    band_keys: Hashes
    shingles: Hashes
    offsets: Offsets


def sign_texts(texts: Sequence[str]) -> Signatures:
    """The signatures of normalised texts; each depends on its own text alone."""
    shingles, offsets = WordHashes(texts).grams(SHINGLE_LEN)
    numbers = array("I")
    for start in range(0, len(texts), _CHUNK):
        borders = offsets[start : start + _CHUNK + 1]
        own = shingles[borders[0] : borders[-1]]
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(own, borders - borders[0], NUM_PERMUTATIONS, _SEED)
        # numpy takes much longer to find out what a list of lists holds.
        for row in matrix.to_rows():
            numbers.fromlist(row)
    return Signatures(_fold_bands(numbers, len(texts)), shingles, offsets)


def _fold_bands(numbers: "array[int]", size: int) -> Hashes:
    """One key for each band, of its eight 32-bit numbers; the band's number is part of it."""
    pairs = np.frombuffer(numbers.tobytes(), "<u8").reshape(size, NUM_BANDS, BAND_LEN // 2)
    keys = np.broadcast_to(np.arange(NUM_BANDS, dtype=np.uint64), pairs.shape[:2]).copy()
    for column in range(BAND_LEN // 2):
        keys = mix(keys * np.uint64(0x9E3779B97F4A7C15) + pairs[:, :, column])
    return keys


def measure_jaccard(left: Hashes, right: Hashes) -> float:
    """Shared over all different shingles of two documents, 0 to 1."""
    left, right = np.unique(left), np.unique(right)
    shared = len(np.intersect1d(left, right, assume_unique=True))
    union = len(left) + len(right) - shared
    return shared / union if union else 0.0
