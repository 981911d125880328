"""How the loopback hub answers: the endpoints of the hub's API that its client library asks for a download."""

import json
import re
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from ar2diff.testing.hub import LoopbackHub, Repo

_REPO = r"(?P<repo>(?:datasets/)?[^/]+/[^/]+?)"
_INFO = re.compile(rf"/api/(?:models/)?{_REPO}(?:/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(rf"/api/(?:models/)?{_REPO}/tree/(?P<revision>[^/]+)")
_FILE = re.compile(rf"/(?P<cdn>cdn/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_GIT = re.compile(rf"/{_REPO}/git-upload-pack")
_WANT = re.compile(rb"want ([0-9a-f]{40})\n")
_RANGE = re.compile(r"bytes=(\d+)-")


class HubRequestHandler(BaseHTTPRequestHandler):
    """One connection to the loopback hub."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with a body."""
        self._answer()

    def do_HEAD(self) -> None:
        """Answer with headers only."""
        self._answer()

    def do_POST(self) -> None:
        """Answer a fetch of git's protocol, version 2."""
        from ar2diff.testing.hub import Request

        self.hub.record(Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        asked = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        match, want = _GIT.fullmatch(self.path), _WANT.search(asked)
        is_version_2 = self.headers.get("Git-Protocol") == "version=2"
        with suppress(BrokenPipeError, ConnectionResetError):
            if match is None or want is None or not is_version_2 or self.hub.faults.no_git:
                self._refuse(404, None)
            elif repo := self._find(match["repo"], want[1].decode()):
                self._send(200, self.hub.faults.git_answer or _answer_git(repo), {})

    def log_message(self, *_: Any) -> None:
        """Keep the terminal quiet."""

    @property
    def hub(self) -> "LoopbackHub":
        """The hub that this connection belongs to."""
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def _answer(self) -> None:
        from ar2diff.testing.hub import Request

        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.record(Request(self.command, self.path, headers))
        path = unquote(urlsplit(self.path).path)
        # A client that gave up has closed its end, which is no fault of the test.
        with suppress(BrokenPipeError, ConnectionResetError):
            if match := _TREE.fullmatch(path):
                self._answer_tree(match["repo"], match["revision"])
            elif match := _INFO.fullmatch(path):
                self._answer_info(match["repo"], match["revision"] or "main")
            elif match := _FILE.fullmatch(path):
                self._answer_file(match["repo"], match["revision"], match["path"], is_cdn=bool(match["cdn"]))
            else:
                self._refuse(404, "EntryNotFound")

    def _find(self, name: str, revision: str) -> "Repo | None":
        revisions = self.hub.repos.get(name)
        if revisions is None:
            self._refuse(401, None)
            return None
        matches = [repo for known, repo in revisions.items() if known == revision or known.startswith(revision)]
        if not matches:
            self._refuse(404, "RevisionNotFound")
            return None
        return revisions.get(revision, matches[0])

    def _answer_info(self, name: str, revision: str) -> None:
        if repo := self._find(name, revision):
            siblings = [{"rfilename": path} for path in sorted(repo.files)]
            repo_id = name.removeprefix("datasets/")
            sha = self.hub.faults.info_sha or repo.commit_id
            self._send_json(
                {"_id": "0", "id": repo_id, "sha": sha, "siblings": siblings, "tags": [], "private": False}
            )

    def _answer_tree(self, name: str, revision: str) -> None:
        repo = self._find(name, revision)
        if repo is None:
            return
        listing = repo.listing()
        for path in self.hub.faults.extra_paths:
            listing.append({"type": "file", "path": path, "size": 1, "oid": "0" * 40})
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        end = start + self.hub.page_size
        headers = {}
        if end < len(listing):
            base = self.path.partition("?")[0]
            headers["Link"] = f'<{self.hub.endpoint}{base}?recursive=True&cursor={end}>; rel="next"'
        self._send_json(listing[start:end], headers)

    def _answer_file(self, name: str, revision: str, path: str, *, is_cdn: bool) -> None:
        repo, faults = self._find(name, revision), self.hub.faults
        if repo is None:
            return
        if name in faults.gated:
            self._refuse(401, "GatedRepo")
        elif path in faults.missing or path not in repo.files:
            self._refuse(404, "EntryNotFound")
        elif not is_cdn and (status := self.hub.take_status()):
            self._refuse(status, None)
        elif path in repo.pointers and not is_cdn:
            size = str(len(repo.files[path]))
            linked = {"X-Linked-Etag": f'"{repo.etag(path)}"', "X-Linked-Size": size, "X-Repo-Commit": repo.commit_id}
            self._send(
                302, b"", linked | {"Location": f"{self.hub.endpoint}/cdn{self.path}", "Set-Cookie": "seen=1; Path=/"}
            )
        else:
            self._send_file(repo, path)

    def _send_file(self, repo: "Repo", path: str) -> None:
        content, faults = repo.files[path], self.hub.faults
        if path in faults.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if path in faults.longer:
            content += b"more"
        headers = {"ETag": f'"{repo.etag(path)}"', "X-Repo-Commit": repo.commit_id, "Accept-Ranges": "bytes"}
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None or faults.ignore_range:
            self._send(200, content, headers, cut=self.hub.take_cut(len(content)))
            return
        start = int(asked[1])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206, content[start:], headers, cut=self.hub.take_cut(len(content) - start))

    def _refuse(self, status: int, code: str | None) -> None:
        self._send(status, b'{"error": "refused"}', {"X-Error-Code": code} if code else {})

    def _send_json(self, content: object, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


def _answer_git(repo: "Repo") -> bytes:
    from ar2diff.provenance.git_pack import write_pack
    from ar2diff.sources.git_fetch import DELIMITER, FLUSH, write_line

    pack = write_pack(repo.proving_objects())
    pieces = [write_line(b"\x01" + pack[at : at + 1000]) for at in range(0, len(pack), 1000)]
    shallow = write_line(b"shallow-info\n") + write_line(f"shallow {repo.commit_id}\n".encode()) + DELIMITER
    return shallow + write_line(b"packfile\n") + b"".join(pieces) + FLUSH
