"""Files written whole or not at all: a reader sees the old bytes or the new ones, never a part.

The pattern is the usual one for POSIX file systems: write beside the target, fsync, rename, fsync the
folder. A killed writer leaves at most a `*.partial-*` file, which nothing reads.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ar2diff.errors import Ar2diffError, SpaceError

SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PARTIAL_MARK = ".partial-"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def fsync_dir(folder: Path) -> None:
    """Make the folder's entries (renames, new files) durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the bytes of a file that somebody else wrote durable."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


@contextmanager
def open_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open `path` for writing bytes; it appears, complete and durable, only when the block ends well.

    Raises:
        SpaceError: the file system filled up; the old file, if any, is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}{PARTIAL_MARK}{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        fsync_dir(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise space_error(error, path) or error from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all."""
    with open_whole(path) as stream:
        stream.write(content)


def write_text(path: Path, content: str) -> None:
    """Write `content` to `path` as UTF-8, whole or not at all."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: Any) -> None:
    """Write `content` to `path` as indented JSON with a final newline; NaN and infinity are refused."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False, sort_keys=False)
    write_text(path, text + "\n")


def read_json(path: Path, *, error: type[Ar2diffError]) -> Any:
    """Read a JSON file; what goes wrong is raised as `error` naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error("file not found", given=str(path), fix="Check the path") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise error(f"not a readable JSON file: {problem}", given=str(path), fix="Restore the file") from None


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Refuse early where `folder`'s file system has less than `needed_bytes` (plus 5%) free.

    Raises:
        SpaceError: says how much is needed and how much there is.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes * 1.05:
        raise SpaceError(
            f"not enough free space: {needed_bytes / 1e6:.0f} MB are needed",
            given=f"{free_bytes / 1e6:.0f} MB free in {existing}",
            fix="Free some space or choose another folder",
        )


def space_error(error: Exception, path: Path) -> SpaceError | None:
    """`error` as a `SpaceError` where the file system, a quota or a limit on file sizes is full, else None.

    Args:
        error: an `OSError`, or what a Rust library made of one; such a library tells the number in its text alone.
    """
    told = _OS_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    if number not in SPACE_ERRNOS:
        return None
    return SpaceError(
        "the file system is full, nothing was changed",
        given=str(path),
        fix="Free some space and run the same command again",
    )
