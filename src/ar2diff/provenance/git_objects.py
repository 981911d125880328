"""Git's own digests, so that a commit id proves the files on disk: file -> (pointer ->) blob -> tree -> commit.

A commit id is a Merkle root. A large file's blob is a three-line LFS pointer that holds only the SHA-256 and size,
so a few kilobytes of retained objects prove gigabytes. Formats: git's object model, Git LFS pointer version 1.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from ar2diff.hashing import CHUNK_BYTES

ObjectType = Literal["blob", "tree", "commit"]

POINTER_START = b"version https://git-lfs.github.com/spec/v1\n"
_POINTER = re.compile(re.escape(POINTER_START) + rb"oid sha256:([0-9a-f]{64})\nsize (0|[1-9][0-9]*)\n")
_COMMIT_TREE = re.compile(rb"tree ([0-9a-f]{40})\n")
_TREE_MODE = "40000"


class FileDigest(NamedTuple):
    """One file's size and both digests that a hub can promise, from one reading."""

    size_bytes: int
    sha256: str
    blob_id: str


class TreeItem(NamedTuple):
    """One entry of a git tree; mode `40000` is a folder, `100644` a file."""

    mode: str
    name: str
    oid: str


class GitProof(NamedTuple):
    """The outcome of following one file up to a commit; `broken_at` names the first link that does not hold.

    A link that is absent from the retained objects is `missing`, which is weaker evidence, not a contradiction.
    """

    holds: bool
    broken_at: str | None = None
    missing: str | None = None


def object_id(object_type: ObjectType, content: bytes) -> str:
    """Git's SHA-1 id of an object with this raw content."""
    header = f"{object_type} {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def digest_file(path: Path) -> FileDigest:
    """Size, SHA-256 and git blob id of a file, read once in 1 MiB pieces."""
    size_bytes = path.stat().st_size
    sha256 = hashlib.sha256()
    blob = hashlib.sha1(f"blob {size_bytes}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            sha256.update(piece)
            blob.update(piece)
    return FileDigest(size_bytes, sha256.hexdigest(), blob.hexdigest())


def write_pointer(sha256: str, size_bytes: int) -> bytes:
    """The LFS pointer that stands in a git tree for a large file."""
    return POINTER_START + f"oid sha256:{sha256}\nsize {size_bytes}\n".encode()


def read_pointer(content: bytes) -> tuple[str, int] | None:
    """(sha256, size in bytes) of an LFS pointer, or None where `content` is something else."""
    match = _POINTER.fullmatch(content)
    return (match[1].decode(), int(match[2])) if match else None


def is_pointer_file(path: Path) -> bool:
    """Whether a file holds an LFS pointer in place of the data."""
    with path.open("rb") as stream:
        return stream.read(len(POINTER_START)) == POINTER_START


def write_tree(items: Iterable[TreeItem]) -> bytes:
    """Raw content of a tree object; git orders folders as if their names ended in a slash."""
    ordered = sorted(items, key=lambda item: (item.name + ("/" if item.mode == _TREE_MODE else "")).encode())
    return b"".join(f"{item.mode} {item.name}\0".encode() + bytes.fromhex(item.oid) for item in ordered)


def read_tree(content: bytes) -> dict[str, TreeItem] | None:
    """The entries of a raw tree object by name, or None where it is malformed."""
    items: dict[str, TreeItem] = {}
    position = 0
    while position < len(content):
        end = content.find(b"\0", position)
        mode, space, name = content[position:end].partition(b" ")
        oid = content[end + 1 : end + 21]
        if end < 0 or not space or len(oid) != 20:
            return None
        item = TreeItem(mode.decode("ascii", "replace"), name.decode("utf-8", "surrogateescape"), oid.hex())
        items[item.name] = item
        position = end + 21
    return items


def write_commit(tree_id: str, *, message: str, author: str = "nobody <nobody@localhost> 0 +0000") -> bytes:
    """Raw content of a commit without parents, for repositories that are made up in tests."""
    return f"tree {tree_id}\nauthor {author}\ncommitter {author}\n\n{message}\n".encode()


def prove_file(commit_id: str, path: str, file: FileDigest, objects: Mapping[str, bytes]) -> GitProof:
    """Follow `path` from a commit id down the raw `objects` (by id) to the digests of a file on disk.

    The proof holds only if every object hashes to the id that its parent names. An LFS file needs its pointer blob,
    which is rebuilt from the file's own SHA-256 and size, so it need not be retained.
    """
    commit = objects.get(commit_id)
    if commit is None:
        return GitProof(False, missing=f"commit {commit_id}")
    root = _COMMIT_TREE.match(commit)
    if object_id("commit", commit) != commit_id or root is None:
        return GitProof(False, broken_at=f"commit {commit_id}")
    oid = root[1].decode()
    for depth, name in enumerate(parts := path.split("/")):
        tree = objects.get(oid)
        where = "tree /" + "/".join(parts[:depth])
        if tree is None:
            return GitProof(False, missing=f"{where} {oid}")
        items = read_tree(tree)
        if object_id("tree", tree) != oid or items is None or name not in items:
            return GitProof(False, broken_at=where)
        oid = items[name].oid
    pointer_id = object_id("blob", write_pointer(file.sha256, file.size_bytes))
    return GitProof(True) if oid in (file.blob_id, pointer_id) else GitProof(False, broken_at=f"file {path}")


def build_repository(files: Mapping[str, bytes]) -> tuple[str, dict[str, bytes]]:
    """The tree id of a folder with these blobs (path -> content as git holds it) and all its objects by id."""
    objects: dict[str, bytes] = {}
    items: list[TreeItem] = []
    folders: dict[str, dict[str, bytes]] = {}
    for path, content in files.items():
        name, slash, rest = path.partition("/")
        if slash:
            folders.setdefault(name, {})[rest] = content
        else:
            oid = object_id("blob", content)
            objects[oid] = content
            items.append(TreeItem("100644", name, oid))
    for name, inner in folders.items():
        tree_id, inner_objects = build_repository(inner)
        objects |= inner_objects
        items.append(TreeItem(_TREE_MODE, name, tree_id))
    tree = write_tree(items)
    tree_id = object_id("tree", tree)
    return tree_id, objects | {tree_id: tree}
