"""Token shards: documents as flat arrays that are mapped, not read, so that memory does not grow with the data.

A shard is a folder: `token_ids.npy` uint32 [N]; `document_offsets.npy` int64 [n + 1]; `prompt_lens.npy` int32 [n];
`ids.jsonl` with id and source of each document; `removed.jsonl`; `receipt.json`; and `COMPLETE`, which holds the
SHA-256 of the receipt and is written last. The folder is made beside its place and renamed into it.
"""

import json
import os
import shutil
from array import array
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ar2diff.data.documents import Document
from ar2diff.data.tokenize import TokenizedDocument
from ar2diff.errors import DataError
from ar2diff.files import PARTIAL_MARK, fsync_dir, read_json, space_error, write_json, write_text
from ar2diff.hashing import sha256_file

COMPLETE_NAME = "COMPLETE"
RECEIPT_NAME = "receipt.json"
REMOVED_NAME = "removed.jsonl"
IDS_NAME = "ids.jsonl"
ARRAYS = {"token_ids": np.uint32, "document_offsets": np.int64, "prompt_lens": np.int32}


class ShardWriter:
    """Writes a shard document by document; the folder appears under its name only with `finish`.

    Used as a context: leaving it without `finish` removes everything.

    Args:
        scratch: the folder, on the same file system, that is written and then renamed; beside `folder` by default.
    """

    def __init__(self, folder: Path, *, scratch: Path | None = None) -> None:
        self._folder = folder
        self._partial = scratch or folder.with_name(f"{folder.name}{PARTIAL_MARK}{os.getpid()}")
        self._offsets = array("q", [0])
        self._prompt_lens = array("i")
        self._streams: dict[str, IO[bytes]] = {}

    def __enter__(self) -> "ShardWriter":
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        for name in ("token_ids.raw", IDS_NAME, REMOVED_NAME):
            self._streams[name] = (self._partial / name).open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for stream in self._streams.values():
            stream.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        if isinstance(error, OSError) and (full := space_error(error, self._folder)):
            raise full from error

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._prompt_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._offsets[-1]

    def add(self, document: Document, tokenized: TokenizedDocument) -> None:
        """Append one document."""
        token_ids = np.asarray(tokenized.token_ids, dtype=np.uint32)
        self.add_tokens(document.id, document.source, token_ids, tokenized.prompt_len)

    def add_tokens(self, document_id: str, source: str, token_ids: npt.NDArray[np.uint32], prompt_len: int) -> None:
        """Append a document of which only the ids are at hand."""
        self._streams["token_ids.raw"].write(token_ids.astype("<u4", copy=False).tobytes())
        self._offsets.append(self._offsets[-1] + len(token_ids))
        self._prompt_lens.append(prompt_len)
        self._write_line(IDS_NAME, {"id": document_id, "source": source})

    def add_removed(self, entry: dict[str, Any]) -> None:
        """Keep the record of a row that is not trained on."""
        self._write_line(REMOVED_NAME, entry)

    def _write_line(self, name: str, entry: dict[str, Any]) -> None:
        self._streams[name].write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")

    def finish_arrays(self) -> dict[str, str]:
        """Turn what was written into the shard's files; their SHA-256 by name."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        raw = self._partial / "token_ids.raw"
        _wrap_as_npy(raw, self._partial / "token_ids.npy", self.num_tokens)
        np.save(self._partial / "document_offsets.npy", np.array(self._offsets, dtype="<i8"))
        np.save(self._partial / "prompt_lens.npy", np.array(self._prompt_lens, dtype="<i4"))
        names = [*(f"{name}.npy" for name in ARRAYS), IDS_NAME, REMOVED_NAME]
        return {name: sha256_file(self._partial / name) for name in names}

    def finish(self, receipt: dict[str, Any]) -> None:
        """Write the receipt and the mark, then give the folder its name."""
        write_json(self._partial / RECEIPT_NAME, receipt)
        write_text(self._partial / COMPLETE_NAME, sha256_file(self._partial / RECEIPT_NAME) + "\n")
        fsync_dir(self._partial)
        self._partial.rename(self._folder)
        fsync_dir(self._folder.parent)


def _wrap_as_npy(raw: Path, target: Path, size: int) -> None:
    """Put the numpy header before bytes that are already on disk, without reading them all."""
    with raw.open("rb") as source, target.open("wb") as stream:
        header = {"descr": "<u4", "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(stream, header)
        shutil.copyfileobj(source, stream)
        stream.flush()
        os.fsync(stream.fileno())
    raw.unlink()


class TokenShard:
    """A finished shard, its arrays mapped read-only.

    Attributes:
        token_ids: uint32 [N], all documents one after another.
        document_offsets: int64 [n + 1], where each document starts; the last is N.
        prompt_lens: int32 [n], leading tokens of each document that are its prompt.
        receipt: what `prepare` recorded.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.receipt = read_receipt(folder)
        self.token_ids = _map_array(folder, "token_ids")
        self.document_offsets = _map_array(folder, "document_offsets")
        self.prompt_lens = _map_array(folder, "prompt_lens")
        _check_borders(self)

    @property
    def document_lens(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, int64 [n]."""
        return np.diff(self.document_offsets)

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def verify(self) -> None:
        """Hash every file against the receipt.

        Raises:
            DataError: names the first file that differs.
        """
        for name, digest in self.receipt["files"].items():
            path = self.folder / name
            if not path.is_file() or sha256_file(path) != digest:
                raise DataError(
                    f"{name} is not what the receipt says", given=str(self.folder), fix="Prepare it again"
                )


def read_receipt(folder: Path) -> dict[str, Any]:
    """The receipt of a finished shard.

    Raises:
        DataError: the folder is no finished shard, or its receipt was changed.
    """
    mark = folder / COMPLETE_NAME
    if not mark.is_file():
        raise DataError("not a finished data folder", given=str(folder), fix="Run `ar2diff prepare` for it")
    receipt = read_json(folder / RECEIPT_NAME, error=DataError)
    if mark.read_bytes().strip() != sha256_file(folder / RECEIPT_NAME).encode():
        raise DataError("the receipt was changed after it was written", given=str(folder), fix="Prepare it again")
    if not isinstance(receipt, dict) or not isinstance(receipt.get("files"), dict):
        raise DataError("the receipt names no files", given=str(folder), fix="Prepare it again")
    return receipt


def _map_array(folder: Path, name: str) -> npt.NDArray[Any]:
    path = folder / f"{name}.npy"
    try:
        values: npt.NDArray[Any] = np.load(path, mmap_mode="r" if path.stat().st_size > 128 else None)
    except (OSError, ValueError) as error:
        raise DataError(f"{path.name} cannot be read: {error}", given=str(folder), fix="Prepare it again") from None
    if values.dtype != ARRAYS[name] or values.ndim != 1:
        raise DataError(f"{path.name} has the wrong type", given=str(values.dtype), fix="Prepare it again")
    return values


def _check_borders(shard: TokenShard) -> None:
    offsets, lens = shard.document_offsets, shard.document_lens
    holds = (
        len(offsets) == len(shard) + 1
        and offsets[0] == 0
        and offsets[-1] == len(shard.token_ids)
        and bool(np.all(lens > shard.prompt_lens))
    )
    if not holds:
        raise DataError("the document borders do not fit the tokens", given=str(shard.folder), fix="Prepare it again")
