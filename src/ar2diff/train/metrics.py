"""`metrics.jsonl`, one line a step, and the loss curve drawn from it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ar2diff.errors import RunError
from ar2diff.files import open_whole, write_text
from ar2diff.hashing import sha256_file

METRICS_NAME = "metrics.jsonl"
PLOT_NAME = "loss.png"
# Field, label and line style.
CURVES = (
    ("diffusion_loss", "diffusion loss", "-"),
    ("ar_loss", "next-token loss", "--"),
    ("distill_loss", "divergence from the parent", ":"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step.

    Attributes:
        step: counted from 1.
        diffusion_loss, ar_loss, distill_loss: means over the global batch in nats; None where nothing carried them.
        lr: the learning rate of this step.
        grad_norm: before clipping.
        mask_row_norm: of the mask token's embedding row after the step; None where ranks hold parts of it.
        num_tokens: positions computed, all streams.
        num_loss_tokens: positions that carry a loss.
        step_s: seconds of this step; `elapsed_s` of all steps.
        seconds_left: estimate for the rest of the run.
        row_ids: the rows of the step; `batch_sha256` covers its inputs and targets.
    """

    step: int
    block_size: int
    lr: float
    diffusion_loss: float | None
    ar_loss: float | None
    grad_norm: float
    num_tokens: int
    num_loss_tokens: int
    step_s: float
    elapsed_s: float
    seconds_left: float
    progress: float
    row_ids: tuple[int, ...]
    batch_sha256: str
    distill_loss: float | None = None
    mask_row_norm: float | None = None


class TrainProgress(Protocol):
    """Told of each step and each checkpoint; the command line draws it, tests may ignore it."""

    def step_done(self, report: StepReport) -> None:
        """A step is done."""
        ...

    def checkpoint_saved(self, folder: Path) -> None:
        """A checkpoint is complete."""
        ...


class SilentTrainProgress:
    """Draws nothing."""

    def step_done(self, report: StepReport) -> None:
        """Ignore the step."""

    def checkpoint_saved(self, folder: Path) -> None:
        """Ignore the checkpoint."""


class MetricsLog:
    """Appends to a run's `metrics.jsonl`; on opening, lines past `step` (of a lost continuation) are dropped."""

    def __init__(self, out_dir: Path, *, step: int) -> None:
        self._path = out_dir / METRICS_NAME
        kept = [line for line in read_metrics(out_dir) if line["step"] <= step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def append(self, report: StepReport) -> None:
        """Write one line."""
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(report)) + "\n")


def digest_metrics(out_dir: Path) -> str:
    """SHA-256 of a run's metrics as they stand."""
    return sha256_file(out_dir / METRICS_NAME)


def read_metrics(out_dir: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics, oldest first; an absent file has none.

    Raises:
        RunError: a line is damaged.
    """
    path = out_dir / METRICS_NAME
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [_read_line(path, number, line) for number, line in enumerate(lines, start=1)]


def _read_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        raise RunError(f"line {number} is no step of a run", given=str(path), fix="Restore the file, or take it away")
    return entry


def draw_losses(out_dir: Path) -> Path | None:
    """Draw all losses over the steps as `loss.png`, told apart by line style, not colour; None without steps."""
    metrics = read_metrics(out_dir)
    if not metrics:
        return None
    import matplotlib as mpl  # slow to import, and only needed here

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, label, style in CURVES:
        points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, color="black", label=label)
    axes.set(xlabel="optimizer step", ylabel="nats per token")
    if axes.lines:
        axes.legend()
    axes.grid(visible=True, alpha=0.3)
    path = out_dir / PLOT_NAME
    with open_whole(path) as stream:
        figure.savefig(stream, format="png", dpi=120)
    pyplot.close(figure)
    return path
