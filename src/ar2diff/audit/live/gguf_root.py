"""The tensor root of a GGUF file: its tensors dequantised to fp32, under their Hugging Face names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ar2diff.hashing import tensor_root
from ar2diff.models.gguf_file import read_gguf
from ar2diff.models.roots import digest_tensor


def read_fp32_tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Name, shape and little-endian fp32 bytes of every tensor; errors as `gguf_root`."""
    for name, tensor in read_gguf(path).tensors():
        yield name, tuple(tensor.shape), tensor.float().contiguous().numpy().astype("<f4").tobytes()


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The file's metadata as a Hugging Face config; errors as `gguf_root`."""
    return read_gguf(path).hf_config


def gguf_root(path: Path) -> str:
    """The root of the file, one tensor in memory at a time.

    Raises:
        ModelError: the file is damaged or of an unsupported kind.
    """
    return tensor_root(digest_tensor(name, tensor) for name, tensor in read_gguf(path).tensors())
