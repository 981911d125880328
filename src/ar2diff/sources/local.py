"""A file that is already on this machine, copied so that the run holds what it used."""

from pathlib import Path

from ar2diff.errors import SourceError
from ar2diff.files import check_free_space
from ar2diff.provenance.git_objects import digest_file, is_pointer_file
from ar2diff.sources.cache import Expected, copy_whole
from ar2diff.sources.progress import Progress
from ar2diff.sources.receipt import FileReceipt, Receipt
from ar2diff.sources.spec import LocalSource


def fetch_local(source: LocalSource, out_dir: Path, *, progress: Progress) -> Receipt:
    """Copy the file into `out_dir` under its own name.

    Raises:
        SourceError: it is missing, a folder, empty, a Git LFS pointer, unreadable, or not the pinned bytes.
        SpaceError: there is not enough room for the copy.
    """
    path = Path(source.path)
    _check_readable(path)
    digest = digest_file(path)
    if fault := Expected(sha256=source.sha256).fault(digest):
        raise SourceError(f"{path} is not the pinned file: {fault}", fix="Restore it, or pin its new digest")
    target = out_dir / path.name
    if not (target.is_file() and digest_file(target) == digest):
        check_free_space(out_dir, digest.size_bytes)
        progress.start_file(path.name, digest.size_bytes, 0)
        copy_whole(path, target)
        progress.advance(digest.size_bytes)
    if digest_file(target) != digest:
        target.unlink()
        raise SourceError("the file changed while it was copied", given=str(path), fix="Run the same command again")
    file = FileReceipt(path=target.name, size_bytes=digest.size_bytes, sha256=digest.sha256)
    return Receipt(source=str(source), kind="local", files=(file,))


def _check_readable(path: Path) -> None:
    if path.is_dir():
        raise SourceError("a local source is one file, not a folder", given=str(path), fix="Name a file inside it")
    try:
        size_bytes = path.stat().st_size
        is_pointer = path.is_file() and is_pointer_file(path)
    except FileNotFoundError:
        raise SourceError("file not found", given=str(path), fix="Check the path") from None
    except OSError as error:
        raise SourceError(
            f"cannot read the file: {error.strerror}", given=str(path), fix="Check its rights"
        ) from None
    if not path.is_file():
        raise SourceError("not a regular file", given=str(path), fix="Name a file of data")
    if size_bytes == 0:
        raise SourceError("the file is empty", given=str(path), fix="Restore it")
    if is_pointer:
        raise SourceError(
            "the file is a Git LFS pointer, not the data", given=str(path), fix="Run git lfs pull in its checkout"
        )
