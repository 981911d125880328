"""Git's pack files, as far as a few commits and trees need them: the form in which a git server hands objects out.

Formats: gitformat-pack version 2 with both kinds of deltas; the SHA-1 at the end covers the whole.
"""

import hashlib
import zlib
from collections.abc import Mapping

from ar2diff.provenance.git_objects import ObjectType, object_id

HEADER = b"PACK\x00\x00\x00\x02"
MAX_UNPACKED_BYTES = 256 << 20
_TYPES: dict[int, ObjectType] = {1: "commit", 2: "tree", 3: "blob"}
_OFFSET_DELTA, _REFERENCE_DELTA = 6, 7

Object = tuple[ObjectType, bytes]


def read_pack(content: bytes) -> dict[str, Object]:
    """Every commit, tree and blob of a pack by its id, which is computed from what it holds.

    Raises:
        ValueError: the pack is damaged, too large, or needs objects that it does not hold.
    """
    if content[:8] != HEADER or hashlib.sha1(content[:-20], usedforsecurity=False).digest() != content[-20:]:
        raise ValueError("not a whole pack")
    try:
        return _PackReader(content).read_all(int.from_bytes(content[8:12], "big"))
    except (IndexError, KeyError, zlib.error) as error:
        raise ValueError(f"damaged pack: {type(error).__name__}") from None


def write_pack(objects: Mapping[str, Object]) -> bytes:
    """A pack of whole objects, without deltas."""
    numbers = {word: number for number, word in _TYPES.items()}
    parts = [HEADER, len(objects).to_bytes(4, "big")]
    for kind, content in objects.values():
        size, head = len(content) >> 4, (numbers[kind] << 4) | (len(content) & 15)
        entry = bytearray()
        while size:
            entry.append(head | 0x80)
            size, head = size >> 7, size & 0x7F
        parts += [bytes([*entry, head]), zlib.compress(content)]
    whole = b"".join(parts)
    return whole + hashlib.sha1(whole, usedforsecurity=False).digest()


class _PackReader:
    def __init__(self, content: bytes) -> None:
        self._content, self._at, self._left = content[:-20], 12, MAX_UNPACKED_BYTES
        self._by_offset: dict[int, Object] = {}
        self._by_id: dict[str, Object] = {}

    def read_all(self, count: int) -> dict[str, Object]:
        for _ in range(count):
            start = self._at
            kind, size = self._read_entry_head()
            base = self._read_base(kind, start)
            content = self._inflate(size)
            found = (_TYPES[kind], content) if base is None else (base[0], apply_delta(base[1], content))
            self._by_offset[start] = self._by_id[object_id(*found)] = found
        return self._by_id

    def _read_base(self, kind: int, start: int) -> Object | None:
        if kind == _OFFSET_DELTA:
            return self._by_offset[start - self._read_offset()]
        if kind == _REFERENCE_DELTA:
            self._at += 20
            return self._by_id[self._content[self._at - 20 : self._at].hex()]
        return None

    def _next(self) -> int:
        self._at += 1
        return self._content[self._at - 1]

    def _read_entry_head(self) -> tuple[int, int]:
        byte = self._next()
        kind, size, shift = (byte >> 4) & 7, byte & 15, 4
        while byte & 0x80:
            byte = self._next()
            size |= (byte & 0x7F) << shift
            shift += 7
        return kind, size

    def _read_offset(self) -> int:
        byte = self._next()
        offset = byte & 0x7F
        while byte & 0x80:
            byte = self._next()
            offset = ((offset + 1) << 7) | (byte & 0x7F)
        return offset

    def _inflate(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise ValueError("the pack unpacks to too many bytes")
        stream = zlib.decompressobj()
        content = stream.decompress(self._content[self._at :], size + 1)
        if len(content) != size:
            raise ValueError("an object is not of its size")
        # The end mark may not have been read yet.
        stream.decompress(stream.unconsumed_tail, 1)
        self._at = len(self._content) - len(stream.unused_data)
        return content


def apply_delta(base: bytes, delta: bytes) -> bytes:
    """The object that a delta makes of its base.

    Raises:
        ValueError, IndexError: the delta is damaged or of another base.
    """
    base_size, at = _read_size(delta, 0)
    size, at = _read_size(delta, at)
    if base_size != len(base):
        raise ValueError("a delta is of another base")
    made = bytearray()
    while at < len(delta):
        command, at = delta[at], at + 1
        if command & 0x80:
            values = []
            for bits in (range(4), range(4, 7)):
                value = 0
                for place, bit in enumerate(bits):
                    if command & (1 << bit):
                        value |= delta[at] << (8 * place)
                        at += 1
                values.append(value)
            start, length = values[0], values[1] or 0x10000
            made += base[start : start + length]
        else:
            made += delta[at : at + command]
            at += command
    if len(made) != size:
        raise ValueError("a delta is damaged")
    return bytes(made)


def _read_size(delta: bytes, at: int) -> tuple[int, int]:
    size, shift = 0, 0
    while True:
        byte, at = delta[at], at + 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return size, at
