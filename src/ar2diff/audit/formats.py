"""File formats by their first bytes: what an input may be, and what a pickle looks like whatever it is called."""

import json
import re
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

PICKLE_START = re.compile(rb"\x80[\x02-\x05](\x95|[}\](cX\x8a.q])")
TEXT_NAMES = ("LICENSE*", "README*", "*.txt", "*.md", "*.jinja")
HEAD_BYTES = 64


def find_format_fault(path: Path, *, strict: bool) -> str | None:
    """What is wrong with a file's format, or None.

    Args:
        strict: for inputs: the name must be on the allow-list and the content what the name says. Otherwise only
            pickles are found.
    """
    if path.is_symlink():
        return "a link, not a file" if strict else None
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if fault := _pickle_fault(path, head):
        return fault
    return _name_fault(path, head) if strict else None


def _pickle_fault(path: Path, head: bytes) -> str | None:
    if PICKLE_START.match(head):
        return "a pickle"
    if head.startswith(b"\x93NUMPY") and b"'|O'" in head:
        return "an array of pickled objects"
    if head.startswith(b"PK\x03\x04") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inner = [name for name in archive.namelist() if name.endswith((".pkl", ".pickle"))]
        return f"an archive that holds the pickle {inner[0]}" if inner else None
    return None


def _name_fault(path: Path, head: bytes) -> str | None:
    name = path.name
    if name.endswith(".safetensors"):
        length = int.from_bytes(head[:8], "little")
        fits = len(head) > 8 and head[8:9] == b"{" and 8 + length <= path.stat().st_size
        return None if fits else "no safetensors header"
    magics = {".gguf": b"GGUF", ".parquet": b"PAR1", ".whl": b"PK\x03\x04", ".gz": b"\x1f\x8b"}
    if path.suffix in magics:
        return None if head.startswith(magics[path.suffix]) else f"does not begin with {magics[path.suffix]!r}"
    if name == "tokenizer.model":
        return None if head.startswith(b"\n") else "no sentencepiece model"
    if path.suffix == ".json":
        return _json_fault(path)
    if path.suffix in (".jsonl", ".csv") or any(fnmatchcase(name, pattern) for pattern in TEXT_NAMES):
        return "a binary file under a text's name" if b"\0" in head else None
    return "a format that is not on the allow-list"


def _json_fault(path: Path) -> str | None:
    try:
        json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        return "no JSON"
    return None
