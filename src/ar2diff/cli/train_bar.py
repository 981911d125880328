"""The line that `ar2diff train` draws while it works: losses, speed, time left."""

from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

if TYPE_CHECKING:
    from ar2diff.train.metrics import StepReport


class TrainBar:
    """A progress bar on standard error, where results do not go; plain lines where it is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("train"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), console=console
        )
        self._plain = not console.is_terminal
        self._task = self._bar.add_task("starting", total=1.0)

    def __enter__(self) -> Self:
        if not self._plain:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the drawing."""
        # Elsewhere than on a terminal, ending a bar that never began would print an empty line.
        if not self._plain:
            self._bar.stop()

    def step_done(self, report: "StepReport") -> None:
        """Show the newest step."""
        text = describe_step(report)
        if self._plain:
            self._bar.console.print(text, highlight=False)
        else:
            self._bar.start()
            self._bar.update(self._task, completed=report.progress, description=text)

    def checkpoint_saved(self, folder: Path) -> None:
        """Say that a checkpoint is safe."""
        self._bar.console.print(f"saved {folder}", highlight=False, soft_wrap=True)


def describe_step(report: "StepReport") -> str:
    """One step in a line."""
    losses = (("diffusion", report.diffusion_loss), ("ar", report.ar_loss), ("distill", report.distill_loss))
    shown = "  ".join(f"{name} {value:.3f}" for name, value in losses if value is not None)
    speed = report.num_tokens / report.step_s if report.step_s else 0.0
    return f"step {report.step}  {shown}  {speed:.0f} tokens/s  {format_left(report.seconds_left)}"


def format_left(left_s: float) -> str:
    """As `4:05 left`, in minutes and seconds."""
    minutes, seconds = divmod(round(left_s), 60)
    return f"{minutes}:{seconds:02d} left"
