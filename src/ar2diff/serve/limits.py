"""What one server takes in at most, in one place."""

from dataclasses import dataclass

from ar2diff.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a server; times in seconds.

    Attributes:
        max_waiting: choices that wait for the engine; a request with one more than that is answered 429.
        head_s: from opening a connection, or from an answer on it, to the end of the next request's headers.
        slow_reader_s: how long written bytes may stay unread.
        max_choices: choices a request asks for at most, prompts times `n`.
        max_buffered_passes: passes that one answer may be ahead of its reader.
        drain_s: what running requests get to finish after the first SIGTERM.
    """

    max_body_bytes: int = 10 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_connections: int = 512
    max_waiting: int = 64
    max_choices: int = 32
    max_buffered_passes: int = 4096
    head_s: float = 10.0
    body_s: float = 10.0
    queue_s: float = 60.0
    request_s: float = 600.0
    slow_reader_s: float = 30.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive", given=getattr(self, name))
