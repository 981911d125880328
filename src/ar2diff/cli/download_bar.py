"""Downloads as they are drawn on a terminal: one line a file, with bytes and time left."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class DownloadBar:
    """A `sources.progress.Progress` on a rich console: appears with the first file, goes with `stop`.

    Args:
        transient: leave nothing on the screen after `stop`.
    """

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=transient)
        self._task: TaskID | None = None
        self.num_files = 0

    def start_file(self, name: str, total_bytes: int | None, done_bytes: int) -> None:
        """Draw a new line for a file."""
        self._progress.start()
        self.num_files += 1
        self._task = self._progress.add_task(name, total=total_bytes, completed=done_bytes)

    def advance(self, num_bytes: int) -> None:
        """Move the current file's bar."""
        assert self._task is not None
        self._progress.advance(self._task, num_bytes)

    def stop(self) -> None:
        """End the drawing; a later file begins a new one."""
        # Without a terminal rich ends even a bar that never began with an empty line.
        if self._progress.live.is_started:
            self._progress.stop()
        for task in self._progress.task_ids:
            self._progress.remove_task(task)

    def __enter__(self) -> "DownloadBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
