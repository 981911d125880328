"""A Hugging Face hub on 127.0.0.1 that serves repositories from memory and misbehaves on request.

    with LoopbackHub() as hub:
        commit = hub.add_repo("owner/name", {"config.json": b"{}", "model.safetensors": weights})
        fetch(parse_source(f"hub:owner/name@{commit}"), out, endpoint=hub.endpoint, ...)

Commit, tree and blob ids are git's own over the given bytes, and large formats are stored as LFS pointers and served
by a redirect, as on the real one. Every request is kept in `requests`, so that a test can look at what was sent.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import NamedTuple

from ar2diff.hashing import sha256_bytes
from ar2diff.provenance.git_objects import build_repository, object_id, read_tree, write_commit, write_pointer
from ar2diff.provenance.git_pack import Object

LFS_ENDINGS = (".safetensors", ".parquet", ".bin", ".gguf")


class Request(NamedTuple):
    """One request as it arrived; header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Faults:
    """How the hub misbehaves; paths are those inside a repository, every field may be changed while it runs."""

    corrupt: set[str] = field(default_factory=set)
    """These files are served with one byte changed, under the right length and etag."""
    longer: set[str] = field(default_factory=set)
    """These files are served with more bytes than are listed."""
    missing: set[str] = field(default_factory=set)
    """These files are listed, and answer 404."""
    gated: set[str] = field(default_factory=set)
    """These repositories list their files, and answer 401 GatedRepo for each."""
    cut_after_bytes: int | None = None
    """The connection is closed after so many bytes of a file's body..."""
    cut_times: int = 0
    """...this many times, then no more."""
    status_times: list[int] = field(default_factory=list)
    """The next file requests answer these statuses, one each."""
    ignore_range: bool = False
    """Range headers are ignored, as some caches do: the whole file comes with status 200."""
    delay_s: float = 0.0
    """Every answer waits so long."""
    info_sha: str | None = None
    """The commit id that the hub claims, whatever is asked."""
    no_git: bool = False
    """The hub's git side answers 404."""
    git_answer: bytes | None = None
    """What the hub's git side answers, whatever is asked."""
    extra_paths: list[str] = field(default_factory=list)
    """Paths that the listing names besides the real ones."""


class Repo:
    """One repository at one commit: `files` as downloaded, `objects` as git holds them."""

    def __init__(self, files: Mapping[str, bytes], message: str) -> None:
        self.files = dict(files)
        self.pointers = {
            p: write_pointer(sha256_bytes(c), len(c)) for p, c in files.items() if p.endswith(LFS_ENDINGS)
        }
        tree_id, self.objects = build_repository(self.files | self.pointers)
        commit = write_commit(tree_id, message=message)
        self.tree_id, self.commit_id = tree_id, object_id("commit", commit)
        self.objects[self.commit_id] = commit

    def listing(self) -> list[dict[str, object]]:
        """The recursive tree as the hub's API gives it."""
        files = [self._file_entry(path) for path in sorted(self.files)]
        return self._folder_entries("", self.tree_id) + files

    def proving_objects(self) -> dict[str, Object]:
        """The commit and all its trees."""
        kinds: dict[str, Object] = {self.commit_id: ("commit", self.objects[self.commit_id])}
        for oid, content in self.objects.items():
            if object_id("tree", content) == oid:
                kinds[oid] = ("tree", content)
        return kinds

    def etag(self, path: str) -> str:
        """The etag of a file: SHA-256 of an LFS file, else the git blob id."""
        content = self.files[path]
        return sha256_bytes(content) if path in self.pointers else object_id("blob", content)

    def _file_entry(self, path: str) -> dict[str, object]:
        content = self.files[path]
        oid = object_id("blob", self.pointers.get(path, content))
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": oid}
        if pointer := self.pointers.get(path):
            entry["lfs"] = {"oid": sha256_bytes(content), "size": len(content), "pointerSize": len(pointer)}
        return entry

    def _folder_entries(self, prefix: str, tree_id: str) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = []
        for item in (read_tree(self.objects[tree_id]) or {}).values():
            if item.mode == "40000":
                path = prefix + item.name
                entries.append({"type": "directory", "path": path, "oid": item.oid, "size": 0})
                entries += self._folder_entries(path + "/", item.oid)
        return entries


class LoopbackHub:
    """The server; a context manager. `endpoint` is its address, `faults` its misbehaviour."""

    def __init__(self, *, page_size: int = 3) -> None:
        from ar2diff.testing.hub_requests import HubRequestHandler

        self.page_size = page_size
        self.faults = Faults()
        self.requests: list[Request] = []
        self.repos: dict[str, dict[str, Repo]] = {}
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), HubRequestHandler)
        self._server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        # A short poll keeps leaving the context quick.
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    def add_repo(
        self, repo_id: str, files: Mapping[str, bytes], *, dataset: bool = False, branch: str = "main"
    ) -> str:
        """Serve `files` as the newest commit of a branch; returns the commit id."""
        name = f"datasets/{repo_id}" if dataset else repo_id
        revisions = self.repos.setdefault(name, {})
        repo = Repo(files, message=f"commit {len(revisions)}")
        revisions[branch] = revisions[repo.commit_id] = repo
        return repo.commit_id

    def record(self, request: Request) -> None:
        """Keep a request; called by the server's threads."""
        with self._lock:
            self.requests.append(request)
        if self.faults.delay_s:
            time.sleep(self.faults.delay_s)

    def take_cut(self, body_bytes: int) -> int | None:
        """Bytes after which a body of this length is cut, counting down the cuts that are left."""
        with self._lock:
            cut = self.faults.cut_after_bytes
            if cut is None or cut >= body_bytes or self.faults.cut_times <= 0:
                return None
            self.faults.cut_times -= 1
            return cut

    def take_status(self) -> int | None:
        """The status that this file request is to fail with, if any is left."""
        with self._lock:
            return self.faults.status_times.pop(0) if self.faults.status_times else None

    def count_requests(self) -> Counter[str]:
        """Number of requests by method."""
        return Counter(request.method for request in self.requests)

    def __enter__(self) -> "LoopbackHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Waiting for threads would wait for clients that keep their connection open.
    block_on_close = False
    hub: LoopbackHub
