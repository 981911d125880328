"""Keeps evaluation items out of training text: policy `sft-strict-v1`, and `procedural-v1` for generated pairs.

A document is removed where its prompt or response shares any 8-gram of words with an item's question, with
numbers as they are and (for mathematics) masked; where it contains a whole item that is shorter than 8 words;
and where its prompt is similar to an item (rapidfuzz ratio of at least 75) and shares a 5-gram with it.
Words are as in `normalize`. An item's reference answer counts in its 8-grams where it is no worked mathematics:
short steps such as "so he has a total of" are everybody's, and would remove rows that share nothing else.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rapidfuzz import fuzz

from ar2diff.data.blocklist import BlocklistItem, Match
from ar2diff.data.documents import Document
from ar2diff.data.normalize import iterate_grams, mask_numbers, split_words
from ar2diff.data.procedural_overlap import ProceduralPolicy

STRICT_POLICY = "sft-strict-v1"
GRAM_LEN = 8
CANDIDATE_GRAM_LEN = 5
MIN_RATIO = 75.0
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
        self._candidates: dict[Gram, list[int]] = defaultdict(list)
        self._prompts: list[str] = []
        for index, item in enumerate(self._items):
            self._add(index, item)

    def _add(self, index: int, item: BlocklistItem) -> None:
        words = split_words(item.prompt)
        self._prompts.append(" ".join(words))
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
        for gram in set(iterate_grams(words, CANDIDATE_GRAM_LEN)):
            self._candidates[gram].append(index)

    def find(self, document: Document) -> Match | None:
        """The first item that the document repeats, or None."""
        if not self._items:
            return None
        prompt = split_words(document.prompt_text)
        for words in (prompt, split_words(document.response)):
            if (match := self._find_in(words)) is not None:
                return match
        return self._find_similar(prompt)

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

    def _find_similar(self, prompt: list[str]) -> Match | None:
        if self._candidates.keys().isdisjoint(iterate_grams(prompt, CANDIDATE_GRAM_LEN)):
            return None
        text, tried = " ".join(prompt), set[int]()
        for gram in iterate_grams(prompt, CANDIDATE_GRAM_LEN):
            # `get`: indexing a defaultdict would add the gram to it.
            for index in self._candidates.get(gram, ()):
                if index not in tried and fuzz.ratio(text, self._prompts[index], score_cutoff=MIN_RATIO):
                    return self._match(index, "fuzzy", gram)
                tried.add(index)
        return None

    def _match(self, index: int, rule: str, gram: Gram) -> Match:
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
    both by nature; every other pair falls under `sft-strict-v1`.
    """

    def __init__(self, items: Iterable[BlocklistItem], *, template_texts: Iterable[str] = ()) -> None:
        items = list(items)
        self.num_items = len(items)
        generated = [item for item in items if item.procedural]
        self._written = StrictPolicy([item for item in items if not item.procedural])
        self._generated = StrictPolicy(generated)
        self._procedural = ProceduralPolicy(generated, template_texts)

    def find(self, document: Document) -> Match | None:
        """The first item that the document repeats, or None."""
        match = self._written.find(document)
        if match is not None:
            return match
        return self._procedural.find(document) if document.task else self._generated.find(document)
