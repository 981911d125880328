"""Randomness keyed by what it is for: the same key gives the same numbers in any process, rank or order.

Streams are counter-based (numpy's Philox), keyed by a hash of the key's parts, so that nothing has to be
saved to draw the same numbers again.
"""

import hashlib

import numpy as np

KeyPart = str | int


def derive_seed(*key: KeyPart) -> int:
    """A 63-bit seed for `key`; parts are length-prefixed, so ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.blake2b(digest_size=8)
    for part in key:
        encoded = f"{type(part).__name__}:{part}".encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return int.from_bytes(digest.digest(), "little") >> 1


def keyed_generator(*key: KeyPart) -> np.random.Generator:
    """A numpy generator for `key`, independent of every other key's."""
    return np.random.Generator(np.random.Philox(key=derive_seed(*key)))
