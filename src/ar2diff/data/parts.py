"""Parts: a few thousand rows at a time, checked and tokenised by anyone, joined later in their fixed order.

What is in a part depends on its rows, the tokenizer and the blocklist, never on who makes it or when. A part is
one `.npz` file that appears whole, so a finished part is a part that exists.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ar2diff.data.blocklist import Match
from ar2diff.data.config import SourceShare
from ar2diff.data.decontaminate import Decontaminator
from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.gram_hashes import Hashes
from ar2diff.data.locate import read_source
from ar2diff.data.near_duplicates import NUM_BANDS, sign_texts
from ar2diff.data.recipes.procedural import generate_documents
from ar2diff.data.text_batch import TextBatch
from ar2diff.data.tokenize import TokenizedDocument, tokenize_documents
from ar2diff.files import open_whole
from ar2diff.tokenizer import Tokenizer

PART_ROWS = 2048
PART_CHARACTERS = 4_000_000
GENERATED_ROWS = 256
# A shortfall after the expected number of generated rows is made up in small steps.
EXTRA_ROWS = 64
SHOWN_CHARACTERS = 4000

Row = Document | DroppedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWork:
    """The rows of one part, or which rows of a generator they are.

    Args:
        name: of the part's file.
        rows: read from a file; None where `count` rows are generated from `start` on.
    """

    name: str
    share: SourceShare
    rows: tuple[Row, ...] | None = None
    start: int = 0
    count: int = 0

    def read_rows(self) -> Sequence[Row]:
        """All rows, generated where they must be."""
        if self.rows is not None:
            return self.rows
        return list(islice(generate_documents(self.share.task_name, self.share.source, self.start), self.count))


def plan_parts(share: SourceShare, files: list[Path], order: int) -> Iterator[PartWork]:
    """The parts of a source in order; those of a generator never end.

    Args:
        order: the source's place in the config, part of the names.

    Raises:
        ConfigError, DataError: as `read_source`.
    """
    if share.is_procedural:
        yield from _plan_generated(share, order)
        return
    for number, rows in enumerate(_cut_rows(read_source(share, files))):
        yield PartWork(name=_part_name(order, number), share=share, rows=rows)


def _part_name(order: int, number: int) -> str:
    return f"source-{order:03d}-part-{number:06d}.npz"


def _cut_rows(rows: Iterator[Row]) -> Iterator[tuple[Row, ...]]:
    part, size = [], 0
    for row in rows:
        part.append(row)
        if isinstance(row, Document):
            size += len(row.response) + sum(len(message["content"]) for message in row.prompt)
        if len(part) == PART_ROWS or size >= PART_CHARACTERS:
            yield tuple(part)
            part, size = [], 0
    if part:
        yield tuple(part)


def _plan_generated(share: SourceShare, order: int) -> Iterator[PartWork]:
    wanted, made, number = share.count or 0, 0, 0
    while True:
        count = min(GENERATED_ROWS, wanted - made) if made < wanted else EXTRA_ROWS
        yield PartWork(name=_part_name(order, number), share=share, start=share.start + made, count=count)
        made += count
        number += 1


class PartMaker:
    """Makes parts; one in each worker.

    Args:
        max_document_len: ids of longer documents are not kept, only their number.
    """

    def __init__(self, tokenizer: Tokenizer, blocklist: Decontaminator, max_document_len: int, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._blocklist = blocklist
        self._max_len = max_document_len
        self._folder = folder

    def make(self, work: PartWork) -> Path:
        """Check, sign and tokenise the rows and write the part; its path."""
        rows = work.read_rows()
        path = self._folder / work.name
        content = self._build(rows)
        with open_whole(path) as stream:
            np.savez(stream, allow_pickle=False, **content)
        return path

    def _build(self, rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
        entries: list[dict[str, Any]] = [{"id": row.id, "source": row.source} for row in rows]
        for entry, row in zip(entries, rows, strict=True):
            if isinstance(row, DroppedRow):
                entry["reason"] = row.reason
        places = [place for place, row in enumerate(rows) if isinstance(row, Document)]
        batch = TextBatch([row for row in rows if isinstance(row, Document)])
        kept = []
        for index, match in enumerate(self._blocklist.find_all(batch)):
            if match is None:
                kept.append(index)
            else:
                entries[places[index]] |= self._describe(match, batch.documents[index])
        lines = "\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
        content = {"entries": np.frombuffer(lines.encode(), np.uint8)}
        content["places"] = np.array([places[index] for index in kept], np.int64)
        return content | self._build_documents(batch, kept)

    def _describe(self, match: Match, document: Document) -> dict[str, Any]:
        shown = "\n".join([document.prompt_text, document.response])
        item_text = self._blocklist.item_text(match.item_id)
        return {
            "reason": "evaluation item",
            "item": match.item_id,
            "benchmark": match.benchmark,
            "policy": match.policy,
            "rule": match.rule,
            "gram": match.gram,
            # The row of an item that is only kept as hashes would give the item away.
            "text": shown[:SHOWN_CHARACTERS] if item_text else "",
            "item_text": item_text[:SHOWN_CHARACTERS],
        }

    def _build_documents(self, batch: TextBatch, kept: list[int]) -> dict[str, npt.NDArray[Any]]:
        """Arrays over the documents that are left: prompt digests, signatures, tokens."""
        compared = batch.read_compared()
        signatures = sign_texts([compared[index] for index in kept])
        tokenized = tokenize_documents([batch.documents[index] for index in kept], self._tokenizer)
        digests = [blake2b(batch.read_asked(index).encode(), digest_size=16).digest() for index in kept]
        return {
            "prompt_digests": np.frombuffer(b"".join(digests), "<u8").reshape(len(kept), 2),
            "band_keys": signatures.band_keys,
            "shingles": signatures.shingles,
            "shingle_offsets": signatures.offsets,
            **self._build_tokens(tokenized),
        }

    def _build_tokens(self, tokenized: list[TokenizedDocument]) -> dict[str, npt.NDArray[Any]]:
        lens = np.array([len(document.token_ids) for document in tokenized], np.int64)
        short = [document.token_ids for document in tokenized if len(document.token_ids) <= self._max_len]
        return {
            "lens": lens,
            "prompt_lens": np.array([document.prompt_len for document in tokenized], np.int64),
            "token_ids": np.fromiter(chain.from_iterable(short), np.uint32),
            "token_offsets": np.concatenate([[0], np.cumsum(np.where(lens <= self._max_len, lens, 0))]),
        }


class Part:
    """A finished part.

    Attributes:
        entries: one a row: id, source, and what removed it, if anything did.
        places: int64 [n], the rows that are still documents; the arrays below are over these.
        prompt_digests: uint64 [n, 2]; band_keys: uint64 [n, 16]; lens, prompt_lens: int64 [n].
    """

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as content:
            arrays: dict[str, npt.NDArray[Any]] = dict(content)
        self.entries: list[dict[str, Any]] = [
            json.loads(line) for line in arrays["entries"].tobytes().decode().split("\n") if line
        ]
        self.places: npt.NDArray[np.int64] = arrays["places"]
        self.prompt_digests: Hashes = arrays["prompt_digests"]
        self.band_keys: Hashes = arrays["band_keys"].reshape(-1, NUM_BANDS)
        self.lens: npt.NDArray[np.int64] = arrays["lens"]
        self.prompt_lens: npt.NDArray[np.int64] = arrays["prompt_lens"]
        self._shingles, self._shingle_offsets = arrays["shingles"], arrays["shingle_offsets"]
        self._token_ids, self._token_offsets = arrays["token_ids"], arrays["token_offsets"]

    def shingles(self, index: int) -> Hashes:
        """The shingle hashes of document `index`."""
        return self._shingles[self._shingle_offsets[index] : self._shingle_offsets[index + 1]]

    def has_shingles(self) -> npt.NDArray[np.bool_]:
        """Which documents are compared for similarity at all."""
        return np.diff(self._shingle_offsets) > 0

    def token_ids(self, index: int) -> npt.NDArray[np.uint32]:
        """The ids of document `index`; empty where it is too long."""
        return self._token_ids[self._token_offsets[index] : self._token_offsets[index + 1]]
