"""Running the application: its socket, its signals, and an end that leaves nobody without an answer."""

import logging
import socket
from functools import partial
from types import FrameType

import uvicorn
from typing_extensions import override

from ar2diff.errors import ConfigError
from ar2diff.serve.app import build_app
from ar2diff.serve.connection import Connection
from ar2diff.serve.log import LibraryLog
from ar2diff.serve.service import Service

LAST_WORDS_S = 2
"""What responses get to be sent, once every answer is decided."""


class Server(uvicorn.Server):
    """uvicorn with another end: the first signal drains, the second one stops at once.

    `ask_to_stop` does what a signal does.
    """

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            build_app(service),
            http=partial(Connection, limits=service.limits),  # type: ignore[arg-type]  # called like the class
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=service.limits.max_header_bytes,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
        super().__init__(config)
        self._service = service
        self._num_asked = 0
        self._drain_until_s: float | None = None

    def ask_to_stop(self) -> None:
        """Drain; asked again, stop at once."""
        self._num_asked += 1

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.ask_to_stop()

    @override
    async def on_tick(self, counter: int) -> bool:
        self._advance_end()
        return await super().on_tick(counter)

    def _advance_end(self) -> None:
        worker, now = self._service.worker, self._service.clock.seconds()
        if worker.state == "dead" and self._service.served is None:
            self.should_exit = True  # the model could not be loaded
        if self._num_asked and self._drain_until_s is None:
            self._drain_until_s = now + self._service.limits.drain_s
            worker.drain()
        if self._drain_until_s is not None and (self._num_asked > 1 or worker.is_idle or now >= self._drain_until_s):
            worker.stop()
            self.should_exit = True


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        ConfigError: the address is unknown or in use.
    """
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise ConfigError("cannot listen: ports run from 0 to 65535", given=port, fix="Choose another --port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"cannot listen: {error}", given=host, fix="Choose another --host") from None
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except OSError as error:
        opened.close()
        raise ConfigError(f"cannot listen: {error}", given=f"{host}:{port}", fix="Choose another --port") from None
    return opened


def run_server(service: Service, listening: socket.socket) -> None:
    """Serve until a signal ends it.

    Raises:
        Ar2diffError: the model could not be loaded.
    """
    library_log = LibraryLog(service.log)
    uvicorn_log = logging.getLogger("uvicorn")
    uvicorn_log.addHandler(library_log)
    uvicorn_log.propagate = False
    service.worker.start()
    try:
        Server(service).run(sockets=[listening])
    finally:
        service.worker.stop()
        service.worker.join(1.0)
        uvicorn_log.removeHandler(library_log)
    fault = service.worker.fault
    if service.served is None and fault is not None:
        raise fault
