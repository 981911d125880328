"""Taking in a request body: bounded before it is buffered, in time, and JSON by its own words."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from ar2diff.serve.limits import Limits
from ar2diff.serve.problems import ApiError
from ar2diff.serve.stream import Disconnected

_CLOSE = {"connection": "close"}


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 beyond the limit, 408 beyond the time, 415 for another type or encoding.
        Disconnected: the client left before the end.
    """
    _check_type(request)
    try:
        return await asyncio.wait_for(_collect(request, limits.max_body_bytes), limits.body_s)
    except TimeoutError:
        message = f"the body took longer than {limits.body_s:g} s"
        raise ApiError(408, message, code="body_timeout", headers=_CLOSE) from None
    except ClientDisconnect:
        raise Disconnected from None


def too_large(max_bytes: int) -> ApiError:
    """The error for a body beyond the limit."""
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")


async def _collect(request: Request, max_bytes: int) -> bytes:
    content = bytearray()
    async for piece in request.stream():
        if len(content) + len(piece) > max_bytes:
            raise too_large(max_bytes)
        content += piece
    return bytes(content)


def _check_type(request: Request) -> None:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise _unsupported("the body must not be compressed")
    kind, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    if kind.strip() != "application/json":
        raise _unsupported("content-type must be application/json")
    charset = parameters.strip().removeprefix("charset=").strip('"')
    if charset not in ("", "utf-8"):
        raise _unsupported("the body must be UTF-8")


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")
