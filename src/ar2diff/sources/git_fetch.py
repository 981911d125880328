"""The commit and the trees of a pinned commit, from a hub's git side: a few kilobytes that prove the listing.

One request of git's own protocol, version 2: `fetch` of a single commit without its parents and without any blob.
A hub hands out any commit that is asked for by its id. No credential, no cookie, no git program.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ar2diff.files import write_json
from ar2diff.provenance.git_objects import ObjectType, object_id
from ar2diff.provenance.git_pack import read_pack
from ar2diff.sources.transfer import Network, refuse_cookies, transport_errors

OBJECTS_NAME = "git_objects.json"
MAX_PACK_BYTES = 64 << 20
FLUSH, DELIMITER = b"0000", b"0001"
_PROVING: tuple[ObjectType, ...] = ("commit", "tree")


def fetch_git_objects(repository_url: str, commit: str, network: Network) -> dict[str, bytes]:
    """The commit and every tree of it, by id; empty where the server does not hand them out.

    Each object is known by its own digest, so that nothing about the server has to be believed.
    """
    refusals: tuple[type[Exception], ...] = (ValueError, *transport_errors())
    try:
        found = read_pack(_unwrap(_post(f"{repository_url}/git-upload-pack", _ask_for(commit), network)))
    except refusals:
        return {}
    kept = {oid: content for oid, (kind, content) in found.items() if kind in _PROVING}
    return kept if commit in kept else {}


def write_git_objects(folder: Path, objects: dict[str, bytes]) -> None:
    """Keep the objects beside the files that they prove."""
    stored = {oid: base64.b64encode(content).decode() for oid, content in sorted(objects.items())}
    write_json(folder / OBJECTS_NAME, stored)


def read_git_objects(folder: Path) -> dict[str, bytes]:
    """The objects that are kept beside the files; those whose digest is another one are left out.

    Raises:
        ValueError: the file holds something else.
    """
    path = folder / OBJECTS_NAME
    if not path.is_file():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(stored, dict):
        raise ValueError(f"{OBJECTS_NAME} is no JSON object")
    objects = {oid: base64.b64decode(str(content), validate=True) for oid, content in stored.items()}
    return {oid: content for oid, content in objects.items() if oid in _possible_ids(content)}


def write_line(content: bytes) -> bytes:
    """A line of git's protocol: four hex digits of length, which count themselves, before the content."""
    return f"{len(content) + 4:04x}".encode() + content


def read_lines(content: bytes) -> Iterator[bytes | None]:
    """The lines of a message; None for a flush or a delimiter.

    Raises:
        ValueError: a line is cut.
    """
    at = 0
    while at < len(content):
        length = int(content[at : at + 4], 16)
        if length < 4:
            yield None
            at += 4
        elif at + length > len(content):
            raise ValueError("a line of the git protocol is cut")
        else:
            yield content[at + 4 : at + length]
            at += length


def _possible_ids(content: bytes) -> set[str]:
    return {object_id(kind, content) for kind in _PROVING}


def _ask_for(commit: str) -> bytes:
    told = [b"no-progress\n", f"want {commit}\n".encode(), b"deepen 1\n", b"filter blob:none\n", b"done\n"]
    return write_line(b"command=fetch\n") + DELIMITER + b"".join(map(write_line, told)) + FLUSH


def _post(url: str, body: bytes, network: Network) -> bytes:
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    refuse_cookies()
    headers = build_hf_headers(token=False) | {
        "Git-Protocol": "version=2",
        "Content-Type": "application/x-git-upload-pack-request",
        "Accept": "application/x-git-upload-pack-result",
        "Accept-Encoding": "identity",
    }
    received = bytearray()
    session: Any = get_session()
    with session.stream("POST", url, content=body, headers=headers, timeout=network.timeout_s) as response:
        if response.status_code != 200:
            raise ValueError(f"HTTP {response.status_code}")
        for piece in response.iter_bytes():
            received += piece
            if len(received) > MAX_PACK_BYTES:
                raise ValueError("more git objects than a listing needs")
    return bytes(received)


def _unwrap(answer: bytes) -> bytes:
    """The pack in an answer: what stands on band 1 after the line `packfile`."""
    pack, is_pack = bytearray(), False
    for line in read_lines(answer):
        if line is None:
            continue
        if is_pack and line[:1] == b"\x01":
            pack += line[1:]
        elif line.startswith(b"ERR ") or (is_pack and line[:1] == b"\x03"):
            raise ValueError("the git server refuses")
        is_pack = is_pack or line == b"packfile\n"
    return bytes(pack)
