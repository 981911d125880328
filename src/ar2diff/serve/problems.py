"""Errors as the public client reads them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from typing import Any

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of the response.
        message: for a person.
        code: for a program, such as `context_length_exceeded`.
        param: the request field at fault, dotted.
        kind: the error's `type`; a client fault unless said otherwise.
        headers: added to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = INVALID,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}
        self._error = {"message": message, "type": kind, "param": param, "code": code}

    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        return {"error": self._error}


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that is refused with status 400."""
    return ApiError(400, message, code=code, param=param)


def unavailable(message: str, code: str, *, retry_after_s: int = 5) -> ApiError:
    """A server that cannot answer now."""
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(503, message, code=code, kind="server_error", headers=headers)


def internal_error() -> ApiError:
    """Our own mistake; what it was is in the log only."""
    return failed("internal error", "internal_error")


def failed(message: str, code: str) -> ApiError:
    """An answer that failed underway, through no fault of the request."""
    return ApiError(500, message, code=code, kind="server_error")
