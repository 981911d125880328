"""Downloads as they are drawn on a terminal: one line a file, with bytes and time left."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class DownloadBar:
    """A `sources.progress.Progress` on a rich console; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None
        self.num_files = 0

    def start_file(self, name: str, total_bytes: int | None, done_bytes: int) -> None:
        """Draw a new line for a file."""
        self.num_files += 1
        self._task = self._progress.add_task(name, total=total_bytes, completed=done_bytes)

    def advance(self, num_bytes: int) -> None:
        """Move the current file's bar."""
        assert self._task is not None
        self._progress.advance(self._task, num_bytes)

    def __enter__(self) -> "DownloadBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
