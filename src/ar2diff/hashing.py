"""Digests: of files, of canonical JSON, and of tensors whatever file they lie in."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import rfc8785

CHUNK_BYTES = 1 << 20


def sha256_bytes(content: bytes) -> str:
    """Lower-case hex SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def sha256_file(path: Path) -> str:
    """Lower-case hex SHA-256 of the file's bytes, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def canonical_json(content: object) -> bytes:
    """RFC 8785 bytes of `content`: one text for one value. NaN and integers above 2^53 are refused."""
    return rfc8785.dumps(content)  # type: ignore[arg-type]


def sha256_json(content: object) -> str:
    """SHA-256 of the canonical JSON of `content`."""
    return sha256_bytes(canonical_json(content))


class TensorDigest(NamedTuple):
    """One tensor as it counts for a tensor root; `dtype` is the safetensors name such as `BF16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


def tensor_root(tensors: Iterable[TensorDigest]) -> str:
    """SHA-256 over the sorted (name, dtype, shape, sha256 of raw little-endian bytes) of all tensors.

    Equal for the same tensors in any file, shard order or process.
    """
    return sha256_json([[t.name, t.dtype, list(t.shape), t.sha256] for t in sorted(tensors)])
