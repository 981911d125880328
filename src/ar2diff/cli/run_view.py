"""A run as it is drawn on a terminal: one bar a stage, with losses, speed and time left. Elsewhere, plain lines."""

from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ar2diff.cli.download_bar import DownloadBar
from ar2diff.cli.train_bar import TrainBar, format_left
from ar2diff.clock import Clock, SystemClock

# Where there is no bar to move, a line is written each time another tenth is done, and each minute.
PLAIN_PARTS = 10
PLAIN_EVERY_S = 60.0


@dataclass(slots=True)
class _PlainPart:
    """Of one stage: when it was first heard of, with how much done, and what the last line said when."""

    started_s: float
    done_at_start: int
    written_s: float
    part: int = 0


class PlainDownload:
    """Downloads as one line a file."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start_file(self, name: str, total_bytes: int | None, done_bytes: int) -> None:
        """Name the file and its size."""
        size = "" if total_bytes is None else f", {total_bytes:,} bytes"
        here = f", {done_bytes:,} of them here already" if done_bytes else ""
        self._console.print(f"  getting {name}{size}{here}", markup=False, highlight=False, soft_wrap=True)

    def advance(self, num_bytes: int) -> None:
        """Bytes are not drawn."""

    def stop(self) -> None:
        """Nothing is drawn that would have to end."""


class RunView:
    """A `pipelines.stages.View` on a rich console; use it as a context manager."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        terminal = console.is_terminal
        self.download = DownloadBar(console, transient=True) if terminal else PlainDownload(console)
        self.training = TrainBar(console)
        columns = (TextColumn("  {task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._parts: dict[str, _PlainPart] = {}
        self._stages = 0

    def stage(self, title: str) -> None:
        """Print the stage's number and title."""
        self.settle()
        self._stages += 1
        self._console.print(f"[bold]{self._stages}. {title}[/bold]", highlight=False)

    def data(self, source: str, done: int, total: int | None) -> None:
        """Documents made of one source."""
        self._move(source, source, done, total)

    def evaluation(self, done: int, total: int, mode: str) -> None:
        """Answers given so far."""
        self._move("evaluation", mode, done, total)

    def _move(self, key: str, text: str, done: int, total: int | None) -> None:
        if not self._console.is_terminal:
            self._print_part(key, done, total)
            return
        if key not in self._tasks:
            self._bar.start()
            self._tasks[key] = self._bar.add_task(text, total=total)
        self._bar.update(self._tasks[key], completed=done, total=total, description=text)

    def _print_part(self, key: str, done: int, total: int | None) -> None:
        if not total:
            return
        now_s = self._clock.seconds()
        shown = self._parts.setdefault(key, _PlainPart(now_s, done, now_s))
        part = done * PLAIN_PARTS // total
        late = now_s - shown.written_s >= PLAIN_EVERY_S
        if part > shown.part or late:
            newly = done - shown.done_at_start
            left_s = (now_s - shown.started_s) * (total - done) / newly if late and newly > 0 else 0.0
            left = f", {format_left(left_s)}" if left_s else ""
            shown.part, shown.written_s = part, now_s
            self._console.print(f"  {key}: {done} of {total}{left}", markup=False, highlight=False, soft_wrap=True)

    def settle(self) -> None:
        """End every bar, so that others can print."""
        self.download.stop()
        self.training.stop()
        if self._console.is_terminal:
            self._bar.stop()
        for task in self._tasks.values():
            self._bar.remove_task(task)
        self._tasks.clear()
        self._parts.clear()

    def __enter__(self) -> "RunView":
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()
