"""Where downloads lie between runs: files named by their own digest, checked each time before they are used.

A file grows as `<key>.partial` and gets its name only when its digest is right, so a killed download goes on where
it stopped, and a cache that rotted is noticed and fetched again. `<key>.json` keeps what the server answered.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NamedTuple

from ar2diff.errors import SourceError
from ar2diff.files import check_free_space, fsync_file, open_whole, space_error, write_json
from ar2diff.hashing import CHUNK_BYTES
from ar2diff.provenance.git_objects import FileDigest, digest_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server said about a file, without anything secret."""

    url: str | None = None
    etag: str | None = None
    status: int | None = None


class Expected(NamedTuple):
    """What is promised of a file: its SHA-256 or, for a small file of a repository, its git blob id."""

    sha256: str | None = None
    blob_id: str | None = None
    size_bytes: int | None = None

    @property
    def key(self) -> str:
        """The file's name in a cache."""
        return f"sha256-{self.sha256}" if self.sha256 else f"blob-{self.blob_id}"

    def fault(self, found: FileDigest) -> str | None:
        """What is wrong with the bytes found, or None where they are the promised ones."""
        if self.size_bytes is not None and found.size_bytes != self.size_bytes:
            return f"{found.size_bytes:,} bytes where {self.size_bytes:,} are promised"
        if self.sha256 is not None and found.sha256 != self.sha256:
            return f"sha256 {found.sha256} where {self.sha256} is promised"
        if self.blob_id is not None and found.blob_id != self.blob_id:
            return f"git blob {found.blob_id} where {self.blob_id} is promised"
        return None


class Cache:
    """A folder of verified downloads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, expected: Expected) -> Path:
        """Where the file lies once it is here."""
        return self.folder / expected.key

    def partial(self, expected: Expected) -> Path:
        """Where the file grows."""
        return self.folder / f"{expected.key}.partial"

    def find(self, expected: Expected) -> tuple[FileDigest, Answer] | None:
        """The verified file's digest and the answer it came with; wrong bytes are deleted and count as absent."""
        path = self.path(expected)
        if not path.is_file():
            return None
        digest = digest_file(path)
        if expected.fault(digest):
            path.unlink()
            return None
        return digest, self.read_answer(expected)

    def admit(self, expected: Expected, grown: Path, answer: Answer, *, name: str) -> FileDigest:
        """Verify a file that has arrived and give it its place.

        Raises:
            SourceError: the bytes are not the promised ones; they are deleted, so that a rerun starts afresh.
        """
        digest = digest_file(grown)
        if fault := expected.fault(digest):
            grown.unlink()
            raise SourceError(
                f"{name} arrived with wrong bytes: {fault}",
                fix="They are deleted; run the same command again, and report the source if it stays wrong",
            )
        fsync_file(grown)
        write_json(self._answer_path(expected), asdict(answer))
        grown.replace(self.path(expected))
        return digest

    @contextmanager
    def open_partial(self, expected: Expected) -> Iterator[IO[bytes]]:
        """The growing file, positioned at its end, for this process alone.

        Raises:
            SourceError: another process is downloading the same file.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.partial(expected)
        try:
            with path.open("ab") as stream:
                try:
                    fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise SourceError(
                        "another process is downloading the same file", given=str(path), fix="Wait until it is done"
                    ) from None
                yield stream
        except OSError as error:
            if full := space_error(error, path):
                raise full from error
            raise

    def _answer_path(self, expected: Expected) -> Path:
        return self.folder / f"{expected.key}.json"

    def read_answer(self, expected: Expected) -> Answer:
        """What the server said when the file arrived; empty where that is not known."""
        try:
            return Answer(**json.loads(self._answer_path(expected).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Answer()


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file to `target`, whole or not at all; the copy shares nothing with the cache."""
    with open_whole(target) as out, source.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            out.write(piece)


def check_space_for(cache_dir: Path, cache_bytes: int, out_dir: Path, out_bytes: int) -> None:
    """Refuse early where the cache's or the output's file system has too little room; they may be the same one.

    Raises:
        SpaceError: says how much is needed and how much there is.
    """
    if _device(cache_dir) == _device(out_dir):
        check_free_space(out_dir, cache_bytes + out_bytes)
    else:
        check_free_space(cache_dir, cache_bytes)
        check_free_space(out_dir, out_bytes)


def _device(folder: Path) -> int:
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return existing.stat().st_dev
