"""Keeps evaluation items out of training text: policy `sft-strict-v1`, and `procedural-v1` for generated pairs.

A document is removed where its prompt or response shares any 8-gram of words with an item's question, with
numbers as they are and (for mathematics) masked; where it contains a whole item that is shorter than 8 words;
and where its prompt is similar to an item (rapidfuzz ratio of at least 75) and shares two 4-grams with it
(`similar`).
Words are as in `normalize`. An item's reference answer counts in its 8-grams where it is no worked mathematics:
short steps such as "so he has a total of" are everybody's, and would remove rows that share nothing else.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from ar2diff.data.blocklist import BlocklistItem, Match
from ar2diff.data.documents import Document
from ar2diff.data.gram_hashes import WordHashes
from ar2diff.data.hashed_items import HashedItem, HashedPolicy, build_hashed_item
from ar2diff.data.normalize import iterate_grams, mask_numbers, mask_text, normalize_text, split_words
from ar2diff.data.procedural_overlap import ProceduralPolicy
from ar2diff.data.screen import GramScreen, flag_any
from ar2diff.data.similar import SimilarItems
from ar2diff.data.text_batch import TextBatch

STRICT_POLICY = "sft-strict-v1"
GRAM_LEN = 8
SCREEN_GRAM_LEN = 6
SCREEN_STRIDE = GRAM_LEN - SCREEN_GRAM_LEN + 1
# A masked gram that is mostly numbers belongs to no question in particular.
MIN_PLAIN_WORDS = 4

Gram = tuple[str, ...]


class StrictPolicy:
    """`sft-strict-v1` against a fixed list of items; the first rule that holds names the match.

    Most documents are cleared by a screen: among any eight words in a row, six in a row start at a multiple of
    three, so looking at every third 6-gram (numbers masked) misses no shared 8-gram.
    """

    def __init__(self, items: Sequence[BlocklistItem]) -> None:
        self._items = list(items)
        self._screen: set[Gram] = set()
        self._plain: dict[Gram, int] = {}
        self._masked: dict[Gram, int] = {}
        self._short: dict[int, dict[Gram, int]] = defaultdict(dict)
        for index, item in enumerate(self._items):
            self._add(index, item)
        self._gram_screens = self._build_screens()
        self._similar = SimilarItems([normalize_text(item.prompt) for item in self._items])

    def _build_screens(self) -> list[GramScreen]:
        """For a batch: the runs, numbers masked, that the rules on grams look for."""
        texts = [text for item in self._items for text in (item.prompt, "" if item.is_math else item.reference)]
        masked = [mask_text(normalize_text(text)) for text in texts]
        grams = [GramScreen.of_texts(masked, GRAM_LEN)]
        for size, index in self._short.items():
            grams.append(GramScreen.of_texts([mask_text(" ".join(gram)) for gram in index], size))
        return grams

    def find_all(self, batch: TextBatch) -> list[Match | None]:
        """`find` of each document, faster: the screens clear most of them."""
        if not self._items:
            return [None] * len(batch)
        masked = [WordHashes(part, masked=True) for part in (batch.prompts, batch.responses)]
        has_gram = flag_any(self._gram_screens, masked[0]) | flag_any(self._gram_screens, masked[1])
        matches: list[Match | None] = [None] * len(batch)
        for place in np.flatnonzero(has_gram).tolist():
            matches[place] = self._find_shared(batch.documents[place])
        for place, index in self._similar.find_all(batch.prompts).items():
            matches[place] = matches[place] or self._match_similar(index, batch.prompts[place])
        return matches

    def _add(self, index: int, item: BlocklistItem) -> None:
        words = split_words(item.prompt)
        if 0 < len(words) < GRAM_LEN:
            self._short[len(words)].setdefault(tuple(words), index)
        texts = [words] if item.is_math else [words, split_words(item.reference)]
        for text in texts:
            self._screen.update(iterate_grams(mask_numbers(text), SCREEN_GRAM_LEN))
            for gram in iterate_grams(text, GRAM_LEN):
                self._plain.setdefault(gram, index)
        if item.is_math:
            for gram in iterate_grams(mask_numbers(words), GRAM_LEN):
                if _is_telling(gram):
                    self._masked.setdefault(gram, index)

    def find(self, document: Document) -> Match | None:
        """The first item that the document repeats, or None."""
        if not self._items:
            return None
        if (match := self._find_shared(document)) is not None:
            return match
        prompt = normalize_text(document.prompt_text)
        found = self._similar.find_all([prompt])
        return self._match_similar(found[0], prompt) if found else None

    def _find_shared(self, document: Document) -> Match | None:
        found = (self._find_in(split_words(text)) for text in (document.prompt_text, document.response))
        return next((match for match in found if match is not None), None)

    def _find_in(self, words: list[str]) -> Match | None:
        for size, index in self._short.items():
            if (gram := _first_shared(index, words, size)) is not None:
                return self._match(index[gram], "short-item", gram)
        masked = mask_numbers(words)
        strided = (masked[start::SCREEN_STRIDE] for start in range(SCREEN_GRAM_LEN))
        if self._screen.isdisjoint(zip(*strided, strict=False)):
            return None
        if (gram := _first_shared(self._plain, words, GRAM_LEN)) is not None:
            return self._match(self._plain[gram], "8-gram", gram)
        if (gram := _first_shared(self._masked, masked, GRAM_LEN)) is not None:
            return self._match(self._masked[gram], "8-gram-numbers-masked", gram)
        return None

    def _match_similar(self, index: int, prompt: str) -> Match:
        return self._match(index, "fuzzy", self._similar.first_run(prompt, index).split(" "))

    def _match(self, index: int, rule: str, gram: Sequence[str]) -> Match:
        item = self._items[index]
        return Match(item.id, item.benchmark, STRICT_POLICY, rule, " ".join(gram))


def _is_telling(gram: Gram) -> bool:
    return sum(word != "0" for word in gram) >= MIN_PLAIN_WORDS


def _first_shared(index: dict[Gram, int], words: Sequence[str], size: int) -> Gram | None:
    # The set test runs without a Python step per word; almost every document ends here.
    if index.keys().isdisjoint(iterate_grams(words, size)):
        return None
    return next(gram for gram in iterate_grams(words, size) if gram in index)


class Decontaminator:
    """Applies the right policy to each document.

    Generated documents meet generated items under `procedural-v1`, since the wording of their generator is in
    both by nature; every other pair falls under `sft-strict-v1`. Items whose text is not to be kept, and those
    of `hashed`, are compared by hash.
    """

    def __init__(
        self,
        items: Iterable[BlocklistItem],
        *,
        template_texts: Iterable[str] = (),
        hashed: Iterable[HashedItem] = (),
    ) -> None:
        items, hashed = list(items), list(hashed)
        self.num_items = len(items) + len(hashed)
        shown = [item for item in items if not item.hash_only]
        made = [build_hashed_item(item) for item in items if item.hash_only]
        generated = [item for item in shown if item.procedural]
        self._written = StrictPolicy([item for item in shown if not item.procedural])
        self._generated = StrictPolicy(generated)
        self._procedural = ProceduralPolicy(generated, template_texts)
        self._hashed = HashedPolicy([item for item in made if item] + hashed)
        self._texts = {item.id: item.prompt for item in shown}

    def item_text(self, item_id: str) -> str:
        """The question of an item; empty where only its hashes are kept."""
        return self._texts.get(item_id, "")

    def find(self, document: Document) -> Match | None:
        """The first item that the document repeats, or None."""
        return self.find_all(TextBatch([document]))[0]

    def find_all(self, batch: TextBatch) -> list[Match | None]:
        """`find` of each document."""
        matches = self._written.find_all(batch)
        generated = self._generated.find_all(batch)
        may_be_hashed = self._hashed.flag(batch)
        for place, document in enumerate(batch.documents):
            if matches[place] is None and may_be_hashed[place]:
                matches[place] = self._hashed.find(document)
            if matches[place] is None:
                matches[place] = self._procedural.find(document) if document.task else generated[place]
        return matches
