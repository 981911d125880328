"""What a download tells whoever watches it; the command line draws it, tests and libraries may ignore it."""

from typing import Protocol


class Progress(Protocol):
    """Told of each file as it starts and of the bytes as they arrive."""

    def start_file(self, name: str, total_bytes: int | None, done_bytes: int) -> None:
        """A file begins; `done_bytes` of it are here from an earlier try, `total_bytes` may be unknown."""
        ...

    def advance(self, num_bytes: int) -> None:
        """That many more bytes of the current file have arrived."""
        ...


class SilentProgress:
    """Draws nothing."""

    def start_file(self, name: str, total_bytes: int | None, done_bytes: int) -> None:
        """Ignore the file."""

    def advance(self, num_bytes: int) -> None:
        """Ignore the bytes."""
