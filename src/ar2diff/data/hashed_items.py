"""Evaluation items of which only hashes are kept, for benchmarks whose owners ask that their text stay unpublished.

An item is the sorted 128-bit hashes of its 8-grams (of the whole item where it has fewer words), so neither words
nor their order are stored. The rules are those of `sft-strict-v1` but for similarity, which needs the text.
`*.hashes.json` files are blocklists that can be handed on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ar2diff.data.blocklist import BlocklistItem, Match
from ar2diff.data.documents import Document
from ar2diff.data.gram_hashes import WordHashes
from ar2diff.data.normalize import iterate_grams, mask_numbers, split_words
from ar2diff.data.screen import Flags, GramScreen, flag_any
from ar2diff.data.text_batch import TextBatch
from ar2diff.errors import DataError
from ar2diff.files import read_json, write_json

HASHED_POLICY = "hashed-v1"
HASHES_SUFFIX = ".hashes.json"
FORMAT = "ar2diff-item-hashes-v2"
GRAM_LEN = 8
# A masked gram that is mostly numbers belongs to no question in particular.
MIN_PLAIN_WORDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedItem:
    """One evaluation question as hashes.

    Args:
        size: words of a run.
        plain: hashes of its runs, sorted; masked: the same with numbers masked.
        screen: 32-bit hashes of its masked runs, sorted, which find candidates.
    """

    id: str
    benchmark: str
    size: int
    plain: tuple[str, ...]
    masked: tuple[str, ...]
    screen: tuple[int, ...]


def build_hashed_item(item: BlocklistItem) -> HashedItem | None:
    """The hashes of an item's prompt; None where it has no words."""
    words = split_words(item.prompt)
    size = min(GRAM_LEN, len(words))
    if not size:
        return None
    masked = mask_numbers(words)
    telling = [g for g in iterate_grams(masked, GRAM_LEN) if sum(w != "0" for w in g) >= MIN_PLAIN_WORDS]
    return HashedItem(
        id=item.id,
        benchmark=item.benchmark,
        size=size,
        plain=_hash_grams(iterate_grams(words, size)),
        masked=_hash_grams(telling) if item.is_math else (),
        screen=tuple(GramScreen.of_texts([" ".join(masked)], size).known.tolist()),
    )


def _hash_grams(grams: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({_hash_gram(gram) for gram in grams}))


def _hash_gram(gram: Sequence[str]) -> str:
    return blake2b(" ".join(gram).encode(), digest_size=16).hexdigest()


def write_hashes(path: Path, items: Iterable[HashedItem]) -> None:
    """Write a blocklist of hashes."""
    write_json(path, {"format": FORMAT, "items": [asdict(item) for item in items]})


def read_hashes(path: Path) -> list[HashedItem]:
    """The items of a file that `write_hashes` made.

    Raises:
        DataError: it is no such file.
    """
    content = read_json(path, error=DataError)
    try:
        if content["format"] != FORMAT:
            raise ValueError
        return [_read_item(entry) for entry in content["items"]]
    except (KeyError, TypeError, ValueError):
        raise DataError("not a file of item hashes", given=str(path), fix="Make it anew") from None


def _read_item(entry: dict[str, Any]) -> HashedItem:
    lists = {name: tuple(entry[name]) for name in ("plain", "masked", "screen")}
    return HashedItem(id=str(entry["id"]), benchmark=str(entry["benchmark"]), size=int(entry["size"]), **lists)


class HashedPolicy:
    """The rules on word runs against hashed items."""

    def __init__(self, items: Sequence[HashedItem]) -> None:
        self._items = list(items)
        self._plain: dict[int, dict[str, int]] = {}
        self._masked: dict[str, int] = {}
        for index, item in enumerate(self._items):
            for digest in item.plain:
                self._plain.setdefault(item.size, {}).setdefault(digest, index)
            for digest in item.masked:
                self._masked.setdefault(digest, index)
        self._screens = [self._build_screen(size) for size in self._plain]

    def _build_screen(self, size: int) -> GramScreen:
        known = [value for item in self._items if item.size == size for value in item.screen]
        return GramScreen(np.unique(np.array(known, dtype=np.uint32)), size)

    def flag(self, batch: TextBatch) -> Flags:
        """Which documents may share a run with an item, bool [documents]."""
        texts = (batch.prompts, batch.responses)
        if not self._items:
            return np.zeros(len(batch), np.bool_)
        flags = [flag_any(self._screens, WordHashes(part, masked=True)) for part in texts]
        return flags[0] | flags[1]

    def find(self, document: Document) -> Match | None:
        """The first item of which the prompt or the response holds a run; the match names the run's hash."""
        matches = (self._find_in(split_words(text)) for text in (document.prompt_text, document.response))
        return next((match for match in matches if match), None)

    def _find_in(self, words: list[str]) -> Match | None:
        for size, known in self._plain.items():
            for gram in iterate_grams(words, size):
                if (index := known.get(_hash_gram(gram))) is not None:
                    return self._match(index, "8-gram" if size == GRAM_LEN else "short-item", gram)
        for gram in iterate_grams(mask_numbers(words), GRAM_LEN):
            if (index := self._masked.get(_hash_gram(gram))) is not None:
                return self._match(index, "8-gram-numbers-masked", gram)
        return None

    def _match(self, index: int, rule: str, gram: Sequence[str]) -> Match:
        item = self._items[index]
        return Match(item.id, item.benchmark, HASHED_POLICY, rule, f"blake2b:{_hash_gram(gram)}")
