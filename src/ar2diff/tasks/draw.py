"""Draws for generated problems that stay the same for a key under any numpy release.

Only the raw Philox words are used: numpy promises their stream, but not that of `Generator.integers` or `choice`.
"""

from collections.abc import Sequence
from typing import TypeVar

from ar2diff.seeding import KeyPart, keyed_generator

T = TypeVar("T")
WORDS_PER_READ = 64


class Draw:
    """A stream of choices for one key; equal keys give equal choices in any process."""

    def __init__(self, *key: KeyPart) -> None:
        self._bits = keyed_generator(*key).bit_generator
        self._words: list[int] = []

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included; the modulo bias is below 2^-40 for small ranges."""
        if not self._words:
            self._words = self._bits.random_raw(WORDS_PER_READ).tolist()
        return low + self._words.pop() % (high - low + 1)

    def chance(self, percent: int) -> bool:
        """True in `percent` of 100 cases."""
        return self.integer(1, 100) <= percent

    def pick(self, options: Sequence[T]) -> T:
        """One of `options`, each as likely."""
        return options[self.integer(0, len(options) - 1)]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different places of `options`, in random order."""
        pool = list(options)
        return [pool.pop(self.integer(0, len(pool) - 1)) for _ in range(count)]
