"""What every request passes first: host, key and size checks, a request id, a log line, and errors in one shape.

Plain ASGI, so that a client's going away is seen by whoever answers.
"""

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ar2diff.serve.body import too_large
from ar2diff.serve.page import ASSETS
from ar2diff.serve.problems import ApiError, internal_error, invalid
from ar2diff.serve.service import Service
from ar2diff.serve.stream import Disconnected

OPEN_PATHS = frozenset({b"/health", *(path.encode() for path in ASSETS)})
"""What needs no key: nothing there is a secret."""
MAX_LOGGED_PATH = 128
CLIENT_GONE = 499
# What the queue turns away is counted where it does.
_COUNTED_ELSEWHERE = (429, 503, 504)


class Guard:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._service.new_id()
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        started_s, answer = self._service.clock.seconds(), _Tracked(send, request_id)
        try:
            self._check(scope)
            await self._app(scope, receive, answer)
        except Disconnected:
            answer.status = CLIENT_GONE
        except ApiError as error:
            if error.status not in _COUNTED_ELSEWHERE:
                self._service.metrics.rejected.labels(error.code).inc()
            await answer.fail(error)
        except Exception as error:  # anything else is our own mistake, and still gets an answer
            self._service.log.fault("internal_error", error, request_id=request_id)
            await answer.fail(internal_error())
        finally:
            self._log(scope, request_id, answer.status, self._service.clock.seconds() - started_s)

    def _check(self, scope: Scope) -> None:
        headers, service = scope["headers"], self._service
        _check_size(scope, service.limits.max_header_bytes)
        _check_host(headers, service.allowed_hosts)
        if scope["raw_path"] not in OPEN_PATHS and not service.keys.open_for(headers):
            wanted = {"www-authenticate": "Bearer"}
            raise ApiError(401, "a valid API key is needed", code="invalid_api_key", headers=wanted)
        lengths = [value for name, value in headers if name == b"content-length"]
        if lengths and any(name == b"transfer-encoding" for name, _ in headers):
            error = invalid("content-length and transfer-encoding exclude each other", code="invalid_headers")
            error.headers["connection"] = "close"
            raise error
        if lengths and int(lengths[0]) > service.limits.max_body_bytes:
            raise too_large(service.limits.max_body_bytes)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        self._service.metrics.responses.labels(str(status)).inc()
        path = scope["raw_path"][:MAX_LOGGED_PATH].decode("ascii", "replace")
        self._service.log.event(
            "request",
            request_id=request_id,
            method=scope["method"],
            path=path,
            status=status,
            seconds=round(seconds, 4),
        )


class _Tracked:
    """A `send` that knows what was sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._request_id = send, request_id
        self.status = CLIENT_GONE
        self._is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_started, self.status = True, message["status"]
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self._request_id.encode())]}
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Send an error, where no answer has begun; a stream that has says its end itself."""
        if self._is_started:
            return
        content = json.dumps(error.body()).encode()
        kept: list[tuple[str, Any]] = [("content-type", "application/json"), ("content-length", str(len(content)))]
        headers = [(name.encode(), value.encode()) for name, value in [*kept, *error.headers.items()]]
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": content})


def _check_size(scope: Scope, max_bytes: int) -> None:
    # The parser's own limit is for heads that are not whole yet; one that comes in a single piece passes it.
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    if size + len(scope["raw_path"]) + len(scope["query_string"]) > max_bytes:
        raise ApiError(431, f"the request's headers are larger than {max_bytes} bytes", code="headers_too_large")


def _check_host(headers: list[tuple[bytes, bytes]], allowed: frozenset[str] | None) -> None:
    # A page elsewhere may point its own name at 127.0.0.1; the Host header gives it away.
    if allowed is None:
        return
    given = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    if len(given) != 1 or _without_port(given[0]) not in allowed:
        raise ApiError(421, "this server does not answer for that host", code="wrong_host")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
