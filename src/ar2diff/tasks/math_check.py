"""Whether two mathematical answers are equal, by math-verify, in a process of its own with a time limit."""

import atexit
import importlib.util
import json
import queue
import subprocess
import sys
import threading

from ar2diff.errors import ConfigError

SECONDS = 12.0
START_SECONDS = 120.0


class MathChecker:
    """One worker process; a pair that takes too long is unequal, and the process is replaced."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def is_equal(self, right: str, given: str) -> bool:
        """Whether `given` has the value of `right`; both as a model writes them, formulas between dollars.

        Raises:
            ConfigError: math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("this benchmark is scored with math-verify", fix="Install ar2diff[eval]")
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([right, given]) + "\n")
                process.stdin.flush()
                return bool(json.loads(self._lines.get(timeout=self._seconds)))
            except (OSError, ValueError, queue.Empty):
                self._end()
                return False

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "ar2diff.tasks.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._process, self._lines = process, queue.Queue()
        threading.Thread(target=_pass_on, args=(process, self._lines), daemon=True).start()
        try:
            self._lines.get(timeout=START_SECONDS)
        except queue.Empty:
            self._end()
            raise ConfigError("math-verify does not start", fix="Check the installation") from None
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None


def _pass_on(process: subprocess.Popen[str], lines: "queue.Queue[str]") -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.put(line)
    except ValueError:  # closed while it was read
        pass


CHECKER = MathChecker()
atexit.register(CHECKER.close)
