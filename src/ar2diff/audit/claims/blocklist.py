"""A7: no evaluation item is in the training shard, by decoding the shard itself and looking for each item in it."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ar2diff.audit.data_rerun import find_tokenizer, read_config, read_records
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import DATA_DIR, RunFiles, line_of, read_object_lines
from ar2diff.data.config import DataConfig
from ar2diff.data.decontaminate import GRAM_LEN
from ar2diff.data.documents import Document
from ar2diff.data.evaluation_items import load_problems
from ar2diff.data.hashed_items import HASHES_SUFFIX
from ar2diff.data.normalize import iterate_grams, split_words
from ar2diff.data.recipes.chat_jsonl import read_documents
from ar2diff.data.shards import IDS_NAME, TokenShard
from ar2diff.errors import DataError
from ar2diff.tasks.table import find_task
from ar2diff.tokenizer import Tokenizer

SAMPLES_NAME = "eval_samples.jsonl"
MIN_WORDS = 4

Words = tuple[str, ...]


class WholeItems:
    """Finds items that stand whole, word for word, in a text.

    Args:
        with_symbols: and symbol for symbol, from the first to the last that is no space.
    """

    def __init__(self, items: Iterable[tuple[str, str]], *, min_words: int, with_symbols: bool = False) -> None:
        self._by_start: dict[Words, list[tuple[str, Words, str]]] = defaultdict(list)
        self._with_symbols = with_symbols
        for item_id, text in items:
            words = tuple(split_words(text))
            if len(words) >= min_words:
                self._by_start[words[:GRAM_LEN]].append((item_id, words, _without_spaces(text)))
        self._sizes = {len(start) for start in self._by_start}

    def find(self, text: str) -> str | None:
        """The id of an item that the text contains, or None."""
        words, symbols = split_words(text), _without_spaces(text) if self._with_symbols else ""
        for size in self._sizes:
            for at, gram in enumerate(iterate_grams(words, size)):
                for item_id, item, item_symbols in self._by_start.get(gram, ()):
                    is_whole = tuple(words[at : at + len(item)]) == item
                    if is_whole and (not self._with_symbols or item_symbols in symbols):
                        return item_id
        return None


def _without_spaces(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


class SharedGrams:
    """Finds runs of eight words that a text shares with an item's question."""

    def __init__(self, items: Iterable[tuple[str, str]]) -> None:
        self._grams = {
            gram: item_id for item_id, text in items for gram in iterate_grams(split_words(text), GRAM_LEN)
        }

    def find(self, text: str) -> str | None:
        """The id of an item with a shared run, or None."""
        grams = iterate_grams(split_words(text), GRAM_LEN)
        return next((self._grams[gram] for gram in grams if gram in self._grams), None)


def check_blocklist(run: RunFiles, result: ClaimResult) -> None:
    """No item whole in any document; no 8-gram of one in a document that people wrote; evaluated means kept out."""
    records = read_records(run, result)
    if records is None:
        return
    tokenizer = find_tokenizer(run)
    if tokenizer is None:
        result.missing("a tokenizer to decode the shard with", found_in="base/, checkpoints/")
        return
    config = read_config(records.event.data)
    try:
        items = list(_list_items(config, run.fetched_folders()))
    except DataError as error:
        result.missing("a blocklist file", found=error.problem, found_in=line_of(records.event))
        return
    _check_evaluated(run, {item_id for item_id, _, _ in items}, result)
    if not items:
        result.not_claimed("no evaluation set is declared", found_in=line_of(records.event))
        return
    hits = list(find_hits(items, _scan(records.folder, tokenizer)))
    where = f"{DATA_DIR}/token_ids.npy, decoded"
    result.equal(
        f"documents that hold one of {len(items)} items",
        [],
        hits[:5],
        claimed_in=line_of(records.event),
        found_in=where,
    )


def _list_items(config: DataConfig, fetched: Mapping[str, Path]) -> Iterator[tuple[str, str, bool]]:
    """Id, own text, and whether a generator made it, of every item; items kept as hashes have no text to look for."""
    for share in config.evaluation:
        task = find_task(share.task)
        for problem in load_problems(share, fetched):
            yield problem.id, problem.passage or problem.prompt_text, task.procedural
    for name in config.blocklist_files:
        if name.endswith(HASHES_SUFFIX):
            continue
        for row in read_documents(Path(name), Path(name).name):
            if isinstance(row, Document):
                yield row.id, row.prompt_text, False


def _scan(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Text and source of every document of the shard."""
    shard, ids = TokenShard(folder), read_object_lines(folder / IDS_NAME)
    for idx in range(len(shard)):
        start, end = shard.document_offsets[idx], shard.document_offsets[idx + 1]
        text = tokenizer.decode(shard.token_ids[start:end].tolist())
        yield text, str(ids[idx].get("source")) if idx < len(ids) else ""


def find_hits(items: Sequence[tuple[str, str, bool]], documents: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The documents, as text and source, that hold an item.

    A generator's wording is in all its texts, those that the parent answered too: shared runs count only where people
    wrote. And its numbers make another problem with other signs between them, so there the symbols count.

    Args:
        items: id, own text, and whether a generator made it.
    """
    whole = WholeItems(((item_id, text) for item_id, text, _ in items), min_words=MIN_WORDS)
    # Short generated passages, such as two numbers, come up by chance inside longer ones.
    long_whole = WholeItems(((item_id, text) for item_id, text, _ in items), min_words=GRAM_LEN, with_symbols=True)
    everything = SharedGrams((item_id, text) for item_id, text, _ in items)
    written = SharedGrams((item_id, text) for item_id, text, procedural in items if not procedural)
    for idx, (text, source) in enumerate(documents):
        generated = source.removeprefix("parent:").startswith("procedural:")
        found = (
            long_whole.find(text) or written.find(text) if generated else whole.find(text) or everything.find(text)
        )
        if found is not None:
            yield f"document {idx} ({source}) holds {found}"


def _check_evaluated(run: RunFiles, known: set[str], result: ClaimResult) -> None:
    path = run.folder / SAMPLES_NAME
    if path.is_file():
        asked = {str(sample.get("problem_id")) for sample in read_object_lines(path)}
        here = {"claimed_in": "data.evaluation", "found_in": SAMPLES_NAME}
        result.equal("evaluated problems that were not kept out", [], sorted(asked - known)[:5], **here)
