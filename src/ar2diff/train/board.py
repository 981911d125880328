"""Steps for TensorBoard, beside `metrics.jsonl`, which stays the record: event files may be deleted at any time."""

from pathlib import Path
from typing import Self

from ar2diff.errors import ConfigError
from ar2diff.train.metrics import StepReport, TrainProgress

BOARD_DIR = "tensorboard"
# Name on the board by field of a report.
SCALARS = {
    "loss/diffusion": "diffusion_loss",
    "loss/next_token": "ar_loss",
    "loss/distillation": "distill_loss",
    "norm/gradient": "grad_norm",
    "norm/mask_row": "mask_row_norm",
    "learning_rate": "lr",
    "block_size": "block_size",
    "seconds_per_step": "step_s",
}


class BoardProgress:
    """Writes each step's values as events of TensorBoard, and passes everything on to another progress.

    Used as a context, which flushes and closes the files.

    Raises:
        ConfigError: the extra `train` is not installed.
    """

    def __init__(self, run_dir: Path, inner: TrainProgress) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            fix = "Install it with: pip install 'ar2diff[train]'"
            raise ConfigError(f"TensorBoard is not installed: {error}", fix=fix) from None
        self._build = SummaryWriter
        self._folder, self._inner = run_dir / BOARD_DIR, inner
        self._writer: SummaryWriter | None = None

    def step_done(self, report: StepReport) -> None:
        """Write the step's values; those that it has none of are left out."""
        if self._writer is None:
            # A continuation hides what a lost one has drawn from this step on.
            self._writer = self._build(str(self._folder), purge_step=report.step)
        for name, field in SCALARS.items():
            value = getattr(report, field)
            if value is not None:
                self._writer.add_scalar(name, value, report.step)
        self._inner.step_done(report)

    def checkpoint_saved(self, folder: Path) -> None:
        """Make what is written so far visible to a reader."""
        if self._writer is not None:
            self._writer.flush()
        self._inner.checkpoint_saved(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
