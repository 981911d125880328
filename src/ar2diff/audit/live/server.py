"""A server as an outsider sees it, over HTTP: one that runs already, or one that the audit starts on the loopback."""

import errno
import json
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from ar2diff.audit.run_files import AuditUsageError, read_object
from ar2diff.errors import RunError

START_S, ANSWER_S, END_S = 600.0, 600.0, 20.0
MAX_BODY_BYTES = 64 << 20
CHEAP_WEIGHT_BYTES = 1_000_000_000
AUTO, NONE = "auto", "none"


class ServerError(RunError):
    """A server that does not start, does not answer, or answers something else than was asked."""


class LoopbackError(ServerError):
    """This machine has no loopback interface that is up, so no server can be asked over it."""


def check_loopback() -> None:
    """Refuse to start a server where nothing could reach it, as in a network namespace of its own.

    Raises:
        LoopbackError: the loopback cannot be reached at all.
    """
    try:
        # Nobody listens there: to be refused is to be reached.
        socket.create_connection(("127.0.0.1", 9), timeout=ANSWER_S).close()
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
            fix = "Bring it up: ip link set lo up"
            raise LoopbackError("the loopback interface is down", given="127.0.0.1", fix=fix) from None


class LiveServer:
    """One server by its address.

    Attributes:
        announced: what it printed on starting, line by line; None of a server that ran already.
    """

    def __init__(self, url: str, *, api_key: str | None = None, announced: list[str] | None = None) -> None:
        self.url, self.announced = url.rstrip("/").removesuffix("/v1"), announced
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No proxy: the address is asked, not what somebody put before it.
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path.

        Raises:
            ServerError: there is none.
        """
        return self._open(Request(self.url + path, headers=self._headers))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that a request gets; errors as `get`."""
        headers = {**self._headers, "Content-Type": "application/json"}
        return self._open(Request(self.url + path, data=json.dumps(body).encode(), headers=headers))

    def _open(self, request: Request) -> dict[str, Any]:
        where = urlsplit(request.full_url).path
        try:
            with self._opener.open(request, timeout=ANSWER_S) as response:
                content = json.loads(response.read(MAX_BODY_BYTES))
        except HTTPError as error:
            text = error.read(300).decode("utf-8", "replace")
            raise ServerError(f"{where} answers HTTP {error.code}", given=text) from None
        except (URLError, OSError) as error:
            raise ServerError(f"{where} does not answer: {type(error).__name__}") from None
        except (ValueError, RecursionError):
            raise ServerError(f"{where} answers no JSON") from None
        if not isinstance(content, dict):
            raise ServerError(f"{where} answers no JSON object")
        return content


class ServerUnderAudit:
    """The server that the claims ask: at an address, or started from a checkpoint when the first of them asks.

    Args:
        choice: an address; "auto" starts one for a model up to 1 GB, or of any size where `deep`; "none" asks none.
        api_key: sent to the server.

    Raises:
        AuditUsageError: the choice is no address.
    """

    def __init__(self, choice: str, *, deep: bool, api_key: str | None = None) -> None:
        if choice not in (AUTO, NONE) and urlsplit(choice).scheme not in ("http", "https"):
            raise AuditUsageError("not a server's address", given=choice, fix="Write http://host:port, auto or none")
        self._choice, self._deep, self._api_key = choice, deep, api_key
        self._started: _Started | None = None

    @property
    def is_given(self) -> bool:
        """Whether it runs already, at an address that the user named."""
        return self._choice not in (AUTO, NONE)

    def find_reason_against(self, checkpoint: Path) -> str | None:
        """Why no server is asked, or None."""
        if self._choice == NONE:
            return "no server is asked; --server auto starts one"
        size = sum(path.stat().st_size for path in checkpoint.glob("*model*.safetensors"))
        if self._choice == AUTO and not self._deep and size > CHEAP_WEIGHT_BYTES:
            return f"no server was started for {size / 1e9:.1f} GB of weights; --deep does, --server URL asks one"
        return None

    def open(self, checkpoint: Path) -> LiveServer:
        """The server, started where it is to be.

        Raises:
            LoopbackError: it could not be asked.
            ServerError: it does not start.
        """
        if self.is_given:
            return LiveServer(self._choice, api_key=self._api_key)
        check_loopback()
        if self._started is None:
            self._started = _Started(checkpoint)
        return self._started.wait(self._api_key)

    def __enter__(self) -> "ServerUnderAudit":
        return self

    def __exit__(self, *_: object) -> None:
        if self._started is not None:
            self._started.end()


def choose_precision(checkpoint: Path) -> str:
    """The precision in which the server's tensors are those of the files, without a conversion."""
    return "bf16" if read_object(checkpoint / "config.json").get("dtype") == "bfloat16" else "fp32"


class _Started:
    """`ar2diff serve` on a free port of the loopback."""

    def __init__(self, checkpoint: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        command = [sys.executable, "-m", "ar2diff", "serve", str(checkpoint.absolute()), "--port", "0"]
        self._child = subprocess.Popen(
            [*command, "--precision", choose_precision(checkpoint), "--name", "audited"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._announced: list[str] = []
        assert self._child.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._child.stdout,), daemon=True)
        self._reader.start()

    def wait(self, api_key: str | None) -> LiveServer:
        """The server once it has said that it is ready."""
        while not any(line.startswith("curl ") for line in self._announced):
            try:
                line = self._lines.get(timeout=START_S)
            except queue.Empty:
                raise ServerError("the server does not start") from None
            if line is None:
                self._lines.put(None)
                raise ServerError("the server ended while it started", given=self._last_words())
            self._announced.append(line)
        address = next(line.split()[1] for line in self._announced if line.startswith("address"))
        return LiveServer(address, api_key=api_key, announced=self._announced)

    def end(self) -> None:
        """Stop it, first asking, then not."""
        self._child.terminate()
        try:
            self._child.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join()
        self._log.close()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "no word"
