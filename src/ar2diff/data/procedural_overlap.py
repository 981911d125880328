"""Policy `procedural-v1`: keeps generated evaluation problems out of generated training text.

A generator's instructions and sentence frames are in its training and its evaluation problems alike, so a rule
on plain 8-grams would remove everything and say nothing. Compared is what varies: the words of the passage and
of the answer that are not in the generator's own wording, its *content*. A document is removed where it has

- `same-passage`: an item's passage, word for word,
- `same-content`: an item's content, whatever the wording around it,
- `content-6-gram`: six content words in a row of an item,
- `fuzzy-content`: content similar to an item's (rapidfuzz ratio of at least 75) that shares three words in a row.

Generated documents always meet written items under the strict policy.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rapidfuzz import fuzz

from ar2diff.data.blocklist import BlocklistItem, Match
from ar2diff.data.documents import Document
from ar2diff.data.normalize import iterate_grams, split_words

PROCEDURAL_POLICY = "procedural-v1"
CONTENT_GRAM_LEN = 6
CANDIDATE_GRAM_LEN = 3
MIN_RATIO = 75.0

Gram = tuple[str, ...]


class ProceduralPolicy:
    """`procedural-v1` against a fixed list of generated items.

    Args:
        items: the evaluation problems.
        template_texts: all wording of all generators, as `Task.template_texts` gives it.
    """

    def __init__(self, items: Sequence[BlocklistItem], template_texts: Iterable[str]) -> None:
        self._items = list(items)
        self._template_words = {word for text in template_texts for word in split_words(text)}
        self._passages: dict[Gram, int] = {}
        self._contents: dict[Gram, int] = {}
        self._grams: dict[Gram, int] = {}
        self._candidates: dict[Gram, list[int]] = defaultdict(list)
        self._texts: list[str] = []
        for index, item in enumerate(self._items):
            self._add(index, item)

    def _add(self, index: int, item: BlocklistItem) -> None:
        passage, content = self._read(item.passage or item.prompt, item.reference)
        self._passages.setdefault(tuple(passage), index)
        self._contents.setdefault(tuple(content), index)
        self._texts.append(" ".join(content))
        for gram in iterate_grams(content, CONTENT_GRAM_LEN):
            self._grams.setdefault(gram, index)
        for gram in set(iterate_grams(content, CANDIDATE_GRAM_LEN)):
            self._candidates[gram].append(index)

    def _read(self, passage: str, answer: str) -> tuple[list[str], list[str]]:
        words = split_words(passage)
        content = [word for word in (*words, *split_words(answer)) if word not in self._template_words]
        return words, content

    def find(self, document: Document) -> Match | None:
        """The first item that the generated document repeats, or None."""
        passage, content = self._read(document.passage or document.prompt_text, document.response)
        if (index := self._passages.get(tuple(passage))) is not None:
            return self._match(index, "same-passage", passage)
        if (index := self._contents.get(tuple(content))) is not None:
            return self._match(index, "same-content", content)
        for gram in iterate_grams(content, CONTENT_GRAM_LEN):
            if gram in self._grams:
                return self._match(self._grams[gram], "content-6-gram", gram)
        return self._find_similar(content)

    def _find_similar(self, content: list[str]) -> Match | None:
        text, tried = " ".join(content), set[int]()
        for gram in iterate_grams(content, CANDIDATE_GRAM_LEN):
            for index in self._candidates.get(gram, ()):
                if index not in tried and fuzz.ratio(text, self._texts[index], score_cutoff=MIN_RATIO):
                    return self._match(index, "fuzzy-content", gram)
                tried.add(index)
        return None

    def _match(self, index: int, rule: str, gram: Iterable[str]) -> Match:
        item = self._items[index]
        return Match(item.id, item.benchmark, PROCEDURAL_POLICY, rule, " ".join(gram))
