"""Safetensors files read strictly: the header is checked before the library sees it, every tensor is finite.

Format: 8 bytes little-endian header length, a JSON header, then the raw tensors (the safetensors README).
"""

import errno
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from ar2diff.errors import ModelError, UnsupportedModelError
from ar2diff.files import PARTIAL_MARK, check_free_space, fsync_dir, fsync_file, read_json, space_error

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_]+([.\-][A-Za-z0-9_]+)*")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FETCH = "Fetch the file again"


def list_shards(folder: Path) -> list[Path]:
    """The weight files of a model folder: one, or those its index names.

    Raises:
        ModelError: no safetensors, both a single file and an index, a shard is missing or its name leaves the folder.
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.is_file() and single.is_file():
        raise ModelError(
            f"both {SINGLE_NAME} and {INDEX_NAME} are there", given=str(folder), fix="Remove one of them"
        )
    if single.is_file():
        return [single]
    if index.is_file():
        shards = [folder / name for name in sorted(set(_read_index(index).values()))]
        for shard in shards:
            if not shard.is_file():
                raise ModelError("a shard that the index names is missing", given=shard.name, fix="Fetch it again")
        return shards
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            "only pickle weights are there, and pickle is never read", given=pickles[0], fix="Use safetensors weights"
        )
    raise ModelError(f"no {SINGLE_NAME} in the model folder", given=str(folder), fix="Fetch the model again")


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor of the folder, in its stored dtype, one at a time.

    Raises:
        ModelError: a header is damaged, a tensor is not finite, is in two shards, or contradicts the index.
    """
    shards = list_shards(folder)
    index = folder / INDEX_NAME
    places = _read_index(index) if index.is_file() else None
    seen: set[str] = set()
    for shard in shards:
        for name, tensor in read_file(shard):
            if name in seen:
                raise ModelError(f"tensor {name} is in two shards", given=shard.name, fix=_FETCH)
            if places is not None and places.get(name) != shard.name:
                raise ModelError(f"tensor {name} is not where the index says", given=shard.name, fix=_FETCH)
            seen.add(name)
            yield name, tensor
    if places is not None and (lost := sorted(set(places) - seen)):
        raise ModelError(f"tensor {lost[0]} is in the index but in no shard", fix=_FETCH)


def check_header(path: Path) -> dict[str, Any]:
    """The parsed header of a safetensors file, `__metadata__` left out.

    Raises:
        ModelError: the header is cut, too large, not JSON, has a doubled key, or a name no tensor has.
        UnsupportedModelError: a tensor is stored in a dtype that is not a plain float.
    """
    header = _parse_header(path, _read_header_bytes(path))
    for name, entry in header.items():
        if not _TENSOR_NAME.fullmatch(name):
            raise ModelError("a tensor has a name that no model uses", given=repr(name), fix=_FETCH)
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if dtype not in DTYPES:
            raise UnsupportedModelError(f"tensor {name} is stored in an unsupported dtype", given=str(dtype))
    return header


def _read_header_bytes(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError("the file is cut or is no safetensors file", given=str(path), fix=_FETCH)
        return stream.read(length)


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        doubled = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if doubled:
            raise ModelError(f"key {doubled[0]} is twice in the header", given=path.name, fix=_FETCH)
        return dict(pairs)

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise ModelError("the safetensors header is damaged", given=str(path), fix=_FETCH) from None
    if not isinstance(header, dict):
        raise ModelError("the safetensors header is no object", given=str(path), fix=_FETCH)
    header.pop("__metadata__", None)
    return header


def read_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of one file, by name, in its stored dtype.

    Raises:
        ModelError: the file is damaged or a tensor is not finite.
    """
    header = check_header(path)
    try:
        with safe_open(path, framework="pt") as stream:
            for name in sorted(header):
                tensor = stream.get_tensor(name)
                if not torch.isfinite(tensor).all():
                    raise ModelError(f"tensor {name} holds values that are not finite", given=path.name, fix=_FETCH)
                yield name, tensor
    except safetensors.SafetensorError as error:
        raise ModelError(f"the safetensors file is damaged: {error}", given=path.name, fix=_FETCH) from None


def _read_index(path: Path) -> dict[str, str]:
    content = read_json(path, error=ModelError)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise ModelError("the index names no weight_map", given=str(path), fix=_FETCH)
    for name, shard in places.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise ModelError(f"the index places {name} outside the folder", given=repr(shard), fix=_FETCH)
    return places


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file, whole or not at all, in the tensors' live dtypes.

    Raises:
        SpaceError: not enough free space.
    """
    check_free_space(path.parent, sum(t.numel() * t.element_size() for t in tensors.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}{PARTIAL_MARK}weights")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(plain, partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        fsync_file(partial)
        partial.replace(path)
        fsync_dir(path.parent)
    except (OSError, safetensors.SafetensorError) as problem:
        error = _os_error(problem)
        raise space_error(error, path) or error from problem
    finally:
        partial.unlink(missing_ok=True)


def _os_error(problem: Exception) -> OSError:
    # The library tells the number of a failed write in its text alone.
    if isinstance(problem, OSError):
        return problem
    found = re.search(r"os error (\d+)", str(problem))
    return OSError(int(found[1]) if found else errno.EIO, str(problem))
