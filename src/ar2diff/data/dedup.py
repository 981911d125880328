"""Keeps one of several documents that ask the same, or are almost the same: the first in the order of the sources.

Two documents are the same where the words and signs of their prompts are equal, and almost the same where their
Jaccard similarity is at least `MIN_JACCARD`. A removed document removes nothing itself.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ar2diff.data.key_index import KeyIndex
from ar2diff.data.near_duplicates import MIN_JACCARD, NUM_BANDS, measure_jaccard
from ar2diff.data.parts import Part

CACHED_PARTS = 12


class Repeat(NamedTuple):
    """The earlier document, and the Jaccard similarity of the two; None where the prompts are equal."""

    earlier: str
    similarity: float | None


class Deduplicator:
    """Compares the documents of each part with those before them, in the order in which parts are opened.

    Args:
        folder: an empty folder for what does not fit in memory.
        read_part: reads a part again when one of its documents is repeated later.
    """

    def __init__(self, folder: Path, read_part: Callable[[Path], Part] = Part) -> None:
        for name in ("prompts", "bands"):
            (folder / name).mkdir(parents=True)
        self._prompts = KeyIndex(folder / "prompts")
        self._bands = KeyIndex(folder / "bands")
        self._starts: list[int] = []
        self._paths: list[Path] = []
        self._next = 0
        self._read = lru_cache(maxsize=CACHED_PARTS)(read_part)

    def open(self, part: Part, path: Path) -> "OpenPart":
        """Begin with the documents of `part`; the one before must be closed."""
        self._starts.append(self._next)
        self._paths.append(path)
        self._next += len(part.places)
        return OpenPart(self, part, self._starts[-1])

    def find_stored(self, part: Part) -> tuple[dict[int, list[int]], dict[int, set[int]]]:
        """For documents of `part`, the earlier ones that may have the same prompt, and that share a band."""
        same: dict[int, list[int]] = defaultdict(list)
        near: dict[int, set[int]] = defaultdict(set)
        for index, number in zip(*self._prompts.find(part.prompt_digests[:, 0]), strict=True):
            same[int(index)].append(int(number))
        chosen = np.flatnonzero(part.has_shingles())
        places, numbers = self._bands.find(part.band_keys[chosen].ravel())
        for index, number in zip(chosen[places // NUM_BANDS], numbers, strict=True):
            near[int(index)].add(int(number))
        return same, near

    def look_up(self, number: int) -> tuple[Part, int]:
        """The part of an earlier document, and its place there."""
        order = bisect_right(self._starts, number) - 1
        return self._read(self._paths[order]), number - self._starts[order]

    def remember(self, part: Part, start: int, kept: list[int]) -> None:
        """Add documents of `part` that repeat nothing."""
        chosen = np.array(kept, np.int64)
        self._prompts.add(part.prompt_digests[chosen, 0], chosen + start)
        chosen = chosen[part.has_shingles()[chosen]]
        self._bands.add(part.band_keys[chosen].ravel(), np.repeat(chosen + start, NUM_BANDS))


class OpenPart:
    """The documents of one part, asked for in order."""

    def __init__(self, owner: Deduplicator, part: Part, start: int) -> None:
        self._owner, self._part, self._start = owner, part, start
        self._same, self._near = owner.find_stored(part)
        self._has_shingles = part.has_shingles()
        self._fresh_prompts: dict[bytes, int] = {}
        self._fresh_bands: dict[int, list[int]] = defaultdict(list)
        self._kept: list[int] = []

    def find_earlier(self, index: int) -> Repeat | None:
        """What document `index` of the part repeats, or None; it is then remembered."""
        found = self._find_same(index) or self._find_near(index)
        if found is None:
            self._kept.append(index)
            self._fresh_prompts[self._part.prompt_digests[index].tobytes()] = index
            if self._has_shingles[index]:
                for key in self._part.band_keys[index].tolist():
                    self._fresh_bands[key].append(index)
        return found

    def close(self) -> None:
        """Give what is new to the index."""
        self._owner.remember(self._part, self._start, self._kept)

    def _find_same(self, index: int) -> Repeat | None:
        digest = self._part.prompt_digests[index]
        for number in self._same.get(index, ()):
            part, place = self._owner.look_up(number)
            if np.array_equal(part.prompt_digests[place], digest):
                return Repeat(_read_id(part, place), None)
        place_here = self._fresh_prompts.get(digest.tobytes())
        return None if place_here is None else Repeat(_read_id(self._part, place_here), None)

    def _find_near(self, index: int) -> Repeat | None:
        if not self._has_shingles[index]:
            return None
        own = self._part.shingles(index)
        for number in sorted(self._near.get(index, ())):
            part, place = self._owner.look_up(number)
            if (similarity := measure_jaccard(own, part.shingles(place))) >= MIN_JACCARD:
                return Repeat(_read_id(part, place), similarity)
        here = {place for key in self._part.band_keys[index].tolist() for place in self._fresh_bands.get(key, ())}
        for place in sorted(here):
            if (similarity := measure_jaccard(own, self._part.shingles(place))) >= MIN_JACCARD:
                return Repeat(_read_id(self._part, place), similarity)
        return None


def _read_id(part: Part, place: int) -> str:
    return str(part.entries[part.places[place]]["id"])
