"""Compile the C sources for this machine, once, and keep the result in a cache folder.

The name of the result says what it was made from: the sources, the compiler's version and every feature that the
compiler sees in this processor. A finished file appears whole, so that processes may build at the same time.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ar2diff.errors import BuildError
from ar2diff.files import PARTIAL_MARK, fsync_dir, fsync_file
from ar2diff.hashing import sha256_json

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("cc", "gcc", "clang")
# No fused or reordered float arithmetic beyond what the sources ask for: results are part of the contract.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-pthread", "-Wno-psabi")
TIMEOUT_S = 300


def build_library(cache_dir: Path, *, compiler: str | None = None, portable: bool = False) -> Path:
    """The compiled library; built now where the cache folder lacks it.

    Args:
        cache_dir: where compiled libraries are kept. What lies there is run, so it must be the user's own.
        compiler: a C compiler's name or path; None takes the first of `COMPILERS` that exists.
        portable: without this processor's special instructions; same results, much slower.

    Raises:
        BuildError: there is no C compiler, or it failed.
    """
    found = find_compiler(compiler)
    flags = (*FLAGS, "-DAR2_PORTABLE") if portable else FLAGS
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir())}
    # The compiler's own macros name its version and the processor features that it will use.
    macros = _run(found, [*flags, "-dM", "-E", "-x", "c", os.devnull])
    key = sha256_json({"sources": sources, "flags": list(flags), "macros": macros.splitlines()})
    library = cache_dir / f"ar2diff-native-{key[:32]}.so"
    if not library.exists():
        _compile(found, flags, library)
    return library


def find_compiler(compiler: str | None) -> str:
    """The path of the C compiler to use.

    Raises:
        BuildError: there is none.
    """
    for name in (compiler,) if compiler else COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(
        "int8 decoding needs a C compiler and none was found",
        given=f"looked for {compiler or ', '.join(COMPILERS)}",
        fix="Install gcc or clang, or choose another precision",
    )


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = library.with_name(f"{library.name}{PARTIAL_MARK}{os.getpid()}")
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    try:
        _run(compiler, [*flags, "-shared", "-o", str(partial), *sources, "-lm"])
        fsync_file(partial)
        partial.replace(library)
        fsync_dir(library.parent)
    finally:
        partial.unlink(missing_ok=True)


def _run(compiler: str, arguments: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            [compiler, *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C compiler cannot run: {error}", given=compiler, fix=_FIX) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit status {done.returncode}"
        raise BuildError("the C compiler failed on this machine", given=f"{compiler}: {last}", fix=_FIX)
    return done.stdout


_FIX = "Repair the compiler, or choose another precision"
