"""Tensor roots of safetensors files without torch: bytes are hashed where they lie, one tensor at a time.

Format: 8 bytes little-endian header length, a JSON header, then the raw tensors (the safetensors README).
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ar2diff.audit.run_files import read_object
from ar2diff.hashing import CHUNK_BYTES, TensorDigest, tensor_root

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
ADAPTER_NAME = "adapter_model.safetensors"
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
MAX_HEADER_BYTES = 100_000_000
TIED_HEAD = "lm_head.weight"


class StoredTensor(NamedTuple):
    """Where one tensor lies in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    num_bytes: int


def list_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a model folder, from one file or from the shards that its index names.

    Raises:
        FileNotFoundError: a file is absent.
        ValueError: a header is damaged, offsets do not fit the file, or a tensor is stored twice.
    """
    index = folder / INDEX_NAME
    names = [SINGLE_NAME] if not index.is_file() else sorted(set(read_object(index)["weight_map"].values()))
    if any("/" in name or name.startswith(".") for name in names):
        raise ValueError("the index names a file outside the folder")
    tensors = [tensor for name in names for tensor in _read_header(folder / name)]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("a tensor is stored twice")
    return tensors


def list_model_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of a saved model, those of a mask-gated adapter included; errors as `list_tensors`."""
    adapter = folder / ADAPTER_NAME
    return [*list_tensors(folder), *(_read_header(adapter) if adapter.is_file() else [])]


class TensorRoots(NamedTuple):
    """The root of the tensors as stored, and of those that a strict load to fp32 holds."""

    stored: str
    live: str


def stored_root(tensors: list[StoredTensor]) -> str:
    """The root of the tensors as stored."""
    return tensor_root(digest for digest, _ in _digest_all(tensors, widen=False))


def both_roots(tensors: list[StoredTensor], *, tied_head: bool) -> TensorRoots:
    """Both roots from one reading; a tied head that is stored again is no live tensor."""
    digests = _digest_all(tensors)
    live = [
        digest._replace(dtype="F32", sha256=widened)
        for digest, widened in digests
        if not (tied_head and digest.name == TIED_HEAD)
    ]
    return TensorRoots(tensor_root(digest for digest, _ in digests), tensor_root(live))


def served_root(tensors: list[StoredTensor], *, tied_head: bool, dtype: str) -> str:
    """The root of the tensors as a server holds them that computes in `dtype` (F32 or BF16).

    Raises:
        ValueError: a tensor is no kind of weight.
    """
    wanted = [tensor for tensor in tensors if not (tied_head and tensor.name == TIED_HEAD)]
    with ThreadPoolExecutor() as pool:
        return tensor_root(pool.map(lambda tensor: _digest_as(tensor, dtype), wanted))


def read_values(tensor: StoredTensor) -> npt.NDArray[np.float64]:
    """A tensor's values, flat.

    Raises:
        ValueError: it is no kind of weight.
    """
    pieces = [_widen(piece, tensor.dtype).astype(np.float64) for piece in _read_pieces(tensor)]
    return np.concatenate(pieces) if pieces else np.empty(0)


def read_fp32(tensor: StoredTensor) -> Iterator[bytes]:
    """The tensor's bytes as little-endian fp32, in pieces.

    Raises:
        ValueError: it is no kind of weight.
    """
    for piece in _read_pieces(tensor):
        yield _widen(piece, tensor.dtype).astype("<f4").tobytes()


def read_row(tensor: StoredTensor, row: int) -> bytes:
    """One row of a matrix as little-endian fp32 bytes.

    Raises:
        ValueError: there is no such row, or the tensor is no kind of weight.
    """
    if not 0 <= row < tensor.shape[0]:
        raise ValueError(f"{tensor.name} has {tensor.shape[0]} rows and none of number {row}")
    num_bytes = tensor.num_bytes // tensor.shape[0]
    return b"".join(read_fp32(tensor._replace(start=tensor.start + row * num_bytes, num_bytes=num_bytes)))


def _digest_as(tensor: StoredTensor, dtype: str) -> TensorDigest:
    sha256 = hashlib.sha256()
    for piece in _read_pieces(tensor):
        if tensor.dtype == dtype:
            sha256.update(piece)
        else:
            wide = _widen(piece, tensor.dtype).astype("<f4")
            sha256.update((wide if dtype == "F32" else _round_to_bf16(wide)).tobytes())
    return TensorDigest(tensor.name, dtype, tensor.shape, sha256.hexdigest())


def _round_to_bf16(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # To the nearest, ties to even: what remains below the upper half decides, plus that half's last bit.
    bits = values.view("<u4")
    rounded: npt.NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _read_header(path: Path) -> list[StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path.name} is cut or is no safetensors file")
        header = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=_unique)
    header.pop("__metadata__", None)
    tensors = [_place(name, entry, path, 8 + length) for name, entry in header.items()]
    ends = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.start, t.num_bytes)):
        if tensor.start != ends:
            raise ValueError(f"{path.name} has bytes that belong to no tensor, or to two")
        ends += tensor.num_bytes
    if ends != size:
        raise ValueError(f"{path.name} has {size} bytes where its header means {ends}")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key is twice in the header")
    return content


def _place(name: str, entry: dict[str, Any], path: Path, data_start: int) -> StoredTensor:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    num_bytes = SIZES.get(dtype, 0) * int(np.prod(shape, dtype=object)) if min(shape, default=0) >= 0 else -1
    if dtype not in SIZES or end - start != num_bytes:
        raise ValueError(f"tensor {name} of {path.name} does not have the size of its shape")
    return StoredTensor(name, dtype, shape, path, data_start + start, num_bytes)


def _read_pieces(tensor: StoredTensor) -> Iterator[bytes]:
    left = tensor.num_bytes
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.start)
        while left and (piece := stream.read(min(CHUNK_BYTES, left))):
            left -= len(piece)
            yield piece


def _digest_all(tensors: list[StoredTensor], *, widen: bool = True) -> list[tuple[TensorDigest, str]]:
    """Each tensor's digest as stored, and that of its fp32 bytes (empty unless `widen`), on all cores."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda tensor: _digest(tensor, widen=widen), tensors))


def _digest(tensor: StoredTensor, *, widen: bool) -> tuple[TensorDigest, str]:
    stored, wide = hashlib.sha256(), hashlib.sha256()
    for piece in _read_pieces(tensor):
        stored.update(piece)
        if widen:
            wide.update(_widen(piece, tensor.dtype).astype("<f4").tobytes())
    digest = TensorDigest(tensor.name, tensor.dtype, tensor.shape, stored.hexdigest())
    return digest, wide.hexdigest() if widen else ""


def _widen(piece: bytes, dtype: str) -> npt.NDArray[Any]:
    if dtype == "BF16":
        # bf16 is the upper half of an fp32.
        return (np.frombuffer(piece, dtype="<u2").astype("<u4") << 16).view("<f4")
    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
    if dtype not in kinds:
        raise ValueError(f"{dtype} is no kind of weight")
    return np.frombuffer(piece, dtype=kinds[dtype])
