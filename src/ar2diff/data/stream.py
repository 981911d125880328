"""Rows of packed documents in a fixed random order: the same for any number of workers, ranks or restarts.

L positions of a row. A row's content depends on the shard and `row_len` alone, its place on (seed, epoch):
a loader of rank r of n reads the indices r, r + n, r + 2n, ...
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ar2diff.data.packing import pack_documents
from ar2diff.data.shards import TokenShard
from ar2diff.errors import DataError
from ar2diff.seeding import keyed_generator

Ids = npt.NDArray[np.int64]
_PIECE = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One row; no document is cut, and nothing crosses a border.

    Args:
        row_id: the row's number in the shard, the same in every epoch.
        token_ids: int64 [L], the documents one after another, then the end-of-turn token.
        document_starts: int64 [n], where each document begins.
        document_lens: int64 [n], tokens of each; positions after the last document carry no loss.
        prompt_lens: int64 [n], leading tokens of each that are its prompt.
    """

    row_id: int
    token_ids: Ids
    document_starts: Ids
    document_lens: Ids
    prompt_lens: Ids


def draw_order(num_rows: int, seed: int, epoch: int) -> Ids:
    """A permutation of `num_rows` that (seed, epoch) decide, int64; it only uses numpy's pinned Philox words."""
    words = keyed_generator("row-order", seed, epoch).bit_generator.random_raw(num_rows)
    return np.argsort(words, kind="stable").astype(np.int64)


class RowStream:
    """Endless rows of a shard: `row(i)` for any i from 0 on, in any order.

    Args:
        shard_dir: what `prepare` wrote.
        row_len: positions of a row; no document may be longer.
        seed: of the order.

    Raises:
        DataError: the shard is unfinished, damaged or empty, or a document is longer than a row.
    """

    def __init__(self, shard_dir: Path, *, row_len: int, seed: int) -> None:
        self._shard = TokenShard(shard_dir)
        self._row_len = row_len
        self._pad_token_id = self._shard.receipt.get("eos_token_id")
        if type(self._pad_token_id) is not int:
            raise DataError("the receipt names no end token", given=str(shard_dir), fix="Prepare it again")
        self._lens = self._shard.document_lens
        self._documents = pack_documents(self._lens.tolist(), row_len)
        if not self._documents:
            raise DataError("the data folder holds no documents", given=str(shard_dir), fix="Prepare it with sources")
        self._order = lru_cache(maxsize=2)(lambda epoch: draw_order(self.num_rows, seed, epoch))

    def verify(self, *, tokenizer_sha256: str) -> None:
        """Hash the shard's files against its receipt, and compare the tokenizer that made it.

        Args:
            tokenizer_sha256: `data.pipeline.fingerprint_tokenizer` of the model to be trained.

        Raises:
            DataError: a file was changed, or the ids are those of another tokenizer.
        """
        self._shard.verify()
        if self._shard.receipt.get("tokenizer", tokenizer_sha256) != tokenizer_sha256:
            raise DataError(
                "the data was made with another tokenizer than the base model's",
                given=str(self._shard.folder),
                fix="Prepare it again with --tokenizer set to the base",
            )

    def check_ids(self, *, vocab_size: int, mask_token_id: int) -> None:
        """Refuse tokens that the model to be trained cannot read or predict.

        Args:
            vocab_size: rows of its embedding.
            mask_token_id: the row that stands for a hidden token; as a target it has no probability.

        Raises:
            DataError: an id lies beyond the vocabulary, or is the mask's.
        """
        given = str(self._shard.folder)
        # In pieces, so that a mapped file is never in memory whole.
        for start in range(0, self.num_tokens, _PIECE):
            piece = self._shard.token_ids[start : start + _PIECE]
            if (largest := int(piece.max())) >= vocab_size:
                raise DataError(
                    f"the data holds token {largest}, and the model has {vocab_size} rows",
                    given=given,
                    fix="Prepare it again with --tokenizer set to the base",
                )
            if bool((piece == mask_token_id).any()):
                raise DataError(
                    f"the data holds token {mask_token_id}, which stands for a masked one",
                    given=given,
                    fix="Prepare it without that token",
                )

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._documents)

    @property
    def num_tokens(self) -> int:
        """Tokens of documents in one epoch."""
        return len(self._shard.token_ids)

    @property
    def fill(self) -> float:
        """Share of an epoch's positions that carry a document's token."""
        return self.num_tokens / (self.num_rows * self._row_len)

    def row(self, index: int) -> PackedRow:
        """Row `index`, counted since the start of training over all epochs."""
        return self._build_row(self.row_id(index))

    def row_id(self, index: int) -> int:
        """Which row of the shard comes at `index`."""
        epoch, place = divmod(index, self.num_rows)
        return int(self._order(epoch)[place])

    def documents_of(self, row_id: int) -> list[int]:
        """The shard's documents that a row packs, in their order in it."""
        return [int(document) for document in self._documents[row_id]]

    @property
    def prompt_lens(self) -> Ids:
        """Prompt tokens of each document of the shard, int64 [n]."""
        return self._shard.prompt_lens.astype(np.int64)

    @property
    def response_lens(self) -> Ids:
        """Response tokens of each document of the shard, int64 [n]."""
        return self._lens - self.prompt_lens

    def _build_row(self, row_id: int) -> PackedRow:
        members = self._documents[row_id]
        lens = self._lens[members]
        starts = np.concatenate([[0], np.cumsum(lens)[:-1]]).astype(np.int64)
        token_ids = np.full(self._row_len, self._pad_token_id, dtype=np.int64)
        for document, start, length in zip(members, starts, lens, strict=True):
            offset = self._shard.document_offsets[document]
            token_ids[start : start + length] = self._shard.token_ids[offset : offset + length]
        return PackedRow(
            row_id=row_id,
            token_ids=token_ids,
            document_starts=starts,
            document_lens=lens,
            prompt_lens=self._shard.prompt_lens[members].astype(np.int64),
        )
