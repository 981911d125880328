"""Run a program that a model wrote: no network, a read-only system, bounded time, memory, processes and output.

The walls are bubblewrap's namespaces and the kernel's resource limits. Where bubblewrap is missing or may not make
namespaces, nothing is run. The program arrives on standard input and sees an empty environment, its own processes
alone, and one small folder in memory that it may write to.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from ar2diff.errors import ConfigError

_AS_NOBODY: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
# Where a system keeps what a Python needs; absent ones are left out.
_SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives")
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
_READ_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: of wall time, then everything it started is killed.
        memory_bytes: of address space for each process, and of its folder in memory.
        num_processes: processes and threads.
        output_bytes: of each of the two output streams; more ends the program.
    """

    seconds: float = 10.0
    memory_bytes: int = 1_000_000_000
    num_processes: int = 32
    output_bytes: int = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended; `why` is "exit", "time" or "output"."""

    why: str
    exit_code: int
    stdout: str
    stderr: str


def run_program(program: str, *, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run Python source in a sandbox of its own.

    Raises:
        ConfigError: there is no sandbox on this machine.
    """
    limits = limits or Limits()
    check_sandbox()
    return _run(program, stdin, limits)


@lru_cache(maxsize=1)
def check_sandbox() -> None:
    """Refuse to run programs where they cannot be walled in.

    Raises:
        ConfigError: bubblewrap is missing, or may not make namespaces here, or there is no system Python.
    """
    for tool, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux")):
        if shutil.which(tool) is None:
            raise ConfigError(f"programs are run only in a sandbox, and {tool} is missing", fix=f"Install {package}")
    if _python() is None:
        raise ConfigError("the sandbox needs a system Python", given=", ".join(_PYTHONS), fix="Install python3")
    word = secrets.token_hex(8)
    probe = _run(f"print({word!r})", "", Limits())
    if probe.stdout.strip() != word:
        raise ConfigError(
            "bubblewrap cannot make a sandbox here",
            given=probe.stderr.strip()[:200] or f"exit code {probe.exit_code}",
            fix="Allow user namespaces, or evaluate on another machine",
        )


def _run(program: str, stdin: str, limits: Limits) -> Outcome:
    # The loader reads the program's length, the program, and leaves the rest of the stream to the program.
    source = program.encode("utf-8", "replace")
    loader = (
        "import sys\n"
        f"_source = sys.stdin.buffer.read({len(source)}).decode()\n"
        "exec(compile(_source, '<answer>', 'exec'), {'__name__': '__main__'})\n"
    )
    process = subprocess.Popen(
        [*_limited(limits), *_bubblewrap(limits), str(_python()), "-I", "-S", "-c", loader],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
        # The limit on processes does not bind the superuser.
        **(_AS_NOBODY if os.geteuid() == 0 else {}),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    whys: list[str] = []

    def stop(why: str) -> None:
        whys.append(why)
        _kill(process)

    timer = threading.Timer(limits.seconds, stop, ("time",))
    readers = [_Reader(stream, limits.output_bytes, stop) for stream in (process.stdout, process.stderr)]
    feeder = threading.Thread(target=_feed, args=(process.stdin, source + stdin.encode()), daemon=True)
    for thread in (timer, feeder, *readers):
        thread.start()
    try:
        exit_code = process.wait()
        for reader in readers:
            reader.join()
    finally:
        timer.cancel()
        _kill(process)
        process.wait()
    feeder.join(timeout=1.0)
    stdout, stderr = (bytes(reader.content[: limits.output_bytes]).decode("utf-8", "replace") for reader in readers)
    return Outcome(why=whys[0] if whys else "exit", exit_code=exit_code, stdout=stdout, stderr=stderr)


class _Reader(threading.Thread):
    """Keeps what a stream gives, and stops the program where it gives too much."""

    def __init__(self, stream: IO[bytes], most: int, stop: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self._stream, self._most, self._stop_program = stream, most, stop
        self.content = bytearray()

    def run(self) -> None:
        while piece := os.read(self._stream.fileno(), _READ_BYTES):
            self.content += piece
            if len(self.content) > self._most:
                self._stop_program("output")
                break
        self._stream.close()


def _feed(stream: IO[bytes], content: bytes) -> None:
    try:
        stream.write(content)
        stream.close()
    except OSError:  # a program that ended early does not read on
        pass


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Killing bubblewrap ends its process namespace, and with it whatever the program started.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _bubblewrap(limits: Limits) -> Sequence[str]:
    binds = [part for folder in _SYSTEM_DIRS if Path(folder).exists() for part in ("--ro-bind", folder, folder)]
    return [
        "bwrap",
        *binds,
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(min(limits.memory_bytes, 64_000_000)), "--tmpfs", "/tmp"),
        *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--chdir", "/tmp"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"),
    ]


def _limited(limits: Limits) -> Sequence[str]:
    most = {
        "as": limits.memory_bytes,
        "cpu": max(1, round(limits.seconds) + 1),
        "fsize": 16_000_000,
        "nproc": limits.num_processes,
        "core": 0,
        "nofile": 64,
    }
    return ["prlimit", *(f"--{kind}={value}:{value}" for kind, value in most.items()), "--"]


def _python() -> Path | None:
    return next((Path(path) for path in _PYTHONS if os.access(path, os.X_OK)), None)
