"""Safetensors written one tensor at a time: peak memory is that of the largest tensor, not of the model.

Format: 8 bytes little-endian header length, a JSON header padded with spaces to 8 bytes, the raw tensors in the
header's order (the safetensors README). Every file appears whole or not at all.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from ar2diff.export.source import PlannedTensor
from ar2diff.files import check_free_space, open_whole, write_json
from ar2diff.models.roots import DTYPE_NAMES
from ar2diff.models.safetensors_file import INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 5_000_000_000


def write_tensors(
    folder: Path, plan: Sequence[PlannedTensor], dtype: torch.dtype, *, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write planned tensors as one file, or as shards with an index; returns the bytes of all tensors.

    Raises:
        SpaceError: not enough free space.
    """
    total = sum(_num_bytes(tensor, dtype) for tensor in plan)
    check_free_space(folder, total)
    shards = _cut(plan, dtype, shard_bytes)
    if len(shards) == 1:
        _write_shard(folder / SINGLE_NAME, plan, dtype)
        return total
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard, dtype)
        weight_map |= {tensor.name: name for tensor in shard}
    # The index comes last: without it no shard is taken for a model.
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def _cut(plan: Sequence[PlannedTensor], dtype: torch.dtype, shard_bytes: int) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in plan:
        size = _num_bytes(tensor, dtype)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _write_shard(path: Path, plan: Sequence[PlannedTensor], dtype: torch.dtype) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in plan:
        end = offset + _num_bytes(tensor, dtype)
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open_whole(path) as stream:
        stream.write(len(raw).to_bytes(8, "little"))
        stream.write(raw)
        for tensor in plan:
            built = tensor.build()
            assert tuple(built.shape) == tensor.shape
            assert built.dtype == dtype
            stream.write(built.contiguous().flatten().view(torch.uint8).numpy().data)


def _num_bytes(tensor: PlannedTensor, dtype: torch.dtype) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count * dtype.itemsize
