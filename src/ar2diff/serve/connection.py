"""One HTTP connection: uvicorn's own, with bounds on what a client may hold without asking for anything.

The time for a request's head, the time that written bytes may stay unread, the number of connections; and faults of
HTTP itself are answered in the public API's shape.
"""

import asyncio
import json
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from ar2diff.serve.limits import Limits
from ar2diff.serve.problems import ApiError, invalid, unavailable


class Connection(H11Protocol):
    """A connection under limits.

    A client that is refused before its body is read may go on sending: what comes is thrown away until the time for
    the next head is over, so that the refusal is not lost in a reset.
    """

    def __init__(self, *, limits: Limits, **settings: Any) -> None:
        super().__init__(**settings)
        self._limits = limits
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(unavailable("too many connections are open", "too_many_connections"))
            return
        self._wait_for_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._idle_timer)
        _cancel(self._unread_timer)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    @override
    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._idle_timer)

    @override
    def on_response_complete(self) -> None:
        self._wait_for_head()
        super().on_response_complete()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._unread_timer)

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid("this is no HTTP request that this server reads", code="invalid_http"))

    def _wait_for_head(self) -> None:
        # Runs until the next request's head is whole; also ends what a closed connection does not get rid of.
        _cancel(self._idle_timer)
        self._idle_timer = self.loop.call_later(self._limits.head_s, self._end_idle)

    def _end_idle(self) -> None:
        if self.transport.get_write_buffer_size() == 0:
            self.transport.abort()
            return
        self._watch_unread()  # a large answer is still being read
        self.transport.close()

    def _watch_unread(self) -> None:
        _cancel(self._unread_timer)
        size = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self._limits.slow_reader_s, self._check_unread, size)

    def _check_unread(self, size_before: int) -> None:
        # Nothing is written while writing is paused, so a reader that takes anything makes it smaller.
        if self.transport.get_write_buffer_size() >= size_before:
            self.transport.abort()
        else:
            self._watch_unread()

    def _refuse(self, error: ApiError) -> None:
        content = json.dumps(error.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
        listed = [(name.encode(), value.encode()) for name, value in {**headers, **error.headers}.items()]
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is underway: only the cut is left
            self.transport.close()
            return
        for event in (
            h11.Response(status_code=error.status, headers=listed, reason=b""),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
