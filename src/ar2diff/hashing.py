"""Digests: of files, of canonical JSON, and of tensors whatever file they lie in."""

import hashlib
import json
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
    """RFC 8785 bytes of `content`: one text for one value. NaN and integers above 2^53 are refused.

    Plain values take the standard library's encoder, which writes the same bytes several times as fast.
    """
    if _is_plain(content):
        return _PLAIN_ENCODER.encode(content).encode()
    return rfc8785.dumps(content)  # type: ignore[arg-type]


# Circles are not looked for: `_is_plain` has walked the value, and would not have come back.
_PLAIN_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False)
_ALWAYS_PLAIN = frozenset({str, bool, type(None)})
_MAX_INT = 2**53 - 1


def _is_plain(value: object) -> bool:
    """Whether the standard library writes `value` as RFC 8785 does.

    Numbers agree where both use plain decimals with a fraction; keys sort alike where they are ASCII.
    """
    kind = type(value)
    if kind in _ALWAYS_PLAIN:
        return True
    if kind is dict:
        return all(type(k) is str and k.isascii() and _is_plain(v) for k, v in value.items())  # type: ignore[attr-defined]
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if kind is int:
        return -_MAX_INT <= value <= _MAX_INT  # type: ignore[operator]
    return kind is float and 1e-4 <= abs(value) < 1e15 and not value.is_integer()  # type: ignore[arg-type,attr-defined]


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
