"""A run as it is drawn on a terminal: one bar a stage, with losses, speed and time left."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ar2diff.cli.download_bar import DownloadBar

if TYPE_CHECKING:
    from ar2diff.train.metrics import StepReport


class TrainBar:
    """A `train.metrics.TrainProgress`: a bar over the budget with losses, tokens/s and time left.

    Where the console is no terminal, it prints a line now and then instead.
    """

    def __init__(self, console: Console, *, line_every_s: float = 30.0) -> None:
        self._console = console
        self._line_every_s = line_every_s
        self._next_line_s = 0.0
        columns = (TextColumn("  {task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[shown]}"))
        self._bar = Progress(*columns, console=console, transient=True)
        self._task: TaskID | None = None

    def step_done(self, report: "StepReport") -> None:
        """Move the bar to the report's share of the budget."""
        shown = describe_step(report)
        if not self._console.is_terminal:
            if report.elapsed_s >= self._next_line_s:
                self._console.print(f"  step {report.step}: {shown}", highlight=False)
                self._next_line_s = report.elapsed_s + self._line_every_s
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("training", total=1.0, shown=shown)
        self._bar.update(self._task, completed=report.progress, description=f"step {report.step}", shown=shown)

    def checkpoint_saved(self, folder: Path) -> None:
        """Say where the checkpoint is."""
        self._console.print(f"  saved {folder}", highlight=False)

    def stop(self) -> None:
        """End the drawing."""
        self._bar.stop()


def describe_step(report: "StepReport") -> str:
    """Losses, speed and time left of one step."""
    losses = (("diffusion", report.diffusion_loss), ("next token", report.ar_loss))
    shown = [f"{name} {value:.3f}" for name, value in losses if value is not None]
    shown.append(f"{report.num_tokens / report.step_s:.0f} tokens/s")
    shown.append(f"{describe_seconds(report.seconds_left)} left")
    return ", ".join(shown)


def describe_seconds(seconds: float) -> str:
    """`85` as 1:25."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class RunView:
    """A `pipelines.stages.View` on a rich console; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.download = DownloadBar(console, transient=True)
        self.training = TrainBar(console)
        columns = (TextColumn("  {task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._stages = 0

    def stage(self, title: str) -> None:
        """Print the stage's number and title."""
        self._end_bars()
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
            return
        if key not in self._tasks:
            self._bar.start()
            self._tasks[key] = self._bar.add_task(text, total=total)
        self._bar.update(self._tasks[key], completed=done, total=total, description=text)

    def _end_bars(self) -> None:
        self.download.stop()
        self.training.stop()
        self._bar.stop()
        for task in self._tasks.values():
            self._bar.remove_task(task)
        self._tasks.clear()

    def __enter__(self) -> "RunView":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bars()
