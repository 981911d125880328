"""One file over HTTP through the hub library's client: resumed where it was cut, a bounded number of times.

No credential is ever sent: no token, no cookie, whatever the environment or the user's home folder holds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from typing import IO, Any

from ar2diff.errors import ConfigError, SourceError
from ar2diff.sources.cache import Answer
from ar2diff.sources.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How patient downloads are. `num_retries` counts tries in a row that bring nothing new."""

    timeout_s: float = 30.0
    num_retries: int = 5
    retry_wait_s: float = 1.0

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.num_retries < 0 or self.retry_wait_s < 0:
            raise ConfigError("network settings must not be negative", given=self, fix="Use 30 s, 5 retries, 1 s")


def download(url: str, stream: IO[bytes], size_bytes: int, *, network: Network, progress: Progress) -> Answer:
    """Append to `stream` what is missing of the `size_bytes` at `url`; what `stream` holds already is kept.

    Raises:
        SourceError: the connection keeps being cut, or more bytes arrive than are promised.
        OSError, the client's own errors: as the client raises them, for the caller to put in words.
    """
    tries_left = network.num_retries
    while True:
        before = stream.tell()
        try:
            answer = _download_rest(url, stream, size_bytes, network=network, progress=progress)
        except transport_errors() as error:
            fault = f"{type(error).__name__}: {error}"
        else:
            if stream.tell() == size_bytes:
                return answer
            fault = "the connection was closed early"
        stream.flush()
        tries_left = network.num_retries if stream.tell() > before else tries_left - 1
        if tries_left < 0:
            raise SourceError(
                f"the download stopped at {stream.tell():,} of {size_bytes:,} bytes ({fault})",
                given=url,
                fix="Check the network and run the same command again: it goes on from there",
            )
        time.sleep(network.retry_wait_s)


def _download_rest(url: str, stream: IO[bytes], size_bytes: int, *, network: Network, progress: Progress) -> Answer:
    with _open_response(url, stream.tell(), network) as response:
        if response.status_code == 200 and stream.tell():
            progress.advance(-stream.tell())
            stream.seek(0)
            stream.truncate()
        # Pieces as they arrive: with a fixed size, the client drops the last short one when the connection is cut.
        for piece in response.iter_bytes():
            if stream.tell() + len(piece) > size_bytes:
                stream.truncate(0)
                stream.seek(0)
                raise SourceError(
                    f"the server sends more than the promised {size_bytes:,} bytes", given=url, fix="Run it again"
                )
            stream.write(piece)
            progress.advance(len(piece))
        return Answer(url=url, etag=_etag(response), status=response.status_code)


@contextmanager
def _open_response(url: str, offset: int, network: Network) -> Iterator[Any]:
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    refuse_cookies()
    headers = build_hf_headers(token=False) | {"Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    with http_stream_backoff(
        "GET",
        url,
        headers=headers,
        timeout=network.timeout_s,
        max_retries=network.num_retries,
        base_wait_time=network.retry_wait_s,
        retry_on_exceptions=(),
    ) as response:
        hf_raise_for_status(response)
        yield response


def transport_errors() -> tuple[type[Exception], ...]:
    """The client's errors that a retry may cure: refused, cut and timed-out connections."""
    from huggingface_hub.errors import HfHubHTTPError

    # The HTTP library differs between releases of the hub library; its base error is found, not named.
    http_error = next(base for base in HfHubHTTPError.__mro__[1:] if base.__name__ == "HTTPError")
    module = __import__(http_error.__module__.partition(".")[0])
    return (module.TransportError,)


def refuse_cookies() -> None:
    """Make the hub library's shared client neither keep nor send cookies."""
    from huggingface_hub import get_session

    jar = get_session().cookies.jar
    jar.clear()
    jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))


def _etag(response: Any) -> str | None:
    for step in (*response.history, response):
        if etag := step.headers.get("X-Linked-Etag"):
            return str(etag).strip('"')
    etag = response.headers.get("ETag")
    return str(etag).removeprefix("W/").strip('"') if etag else None
