"""Training steps done again, from the start or a checkpoint, by the run's own trainer, against what was logged."""

import math
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pydantic
import torch

from ar2diff.audit.claims.surroundings import find_other_code
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import DATA_DIR, RunFiles, line_of, read_object_lines
from ar2diff.data.stream import RowStream
from ar2diff.models.loading import load_model, root_of_decoder
from ar2diff.provenance.ledger import LEDGER_NAME
from ar2diff.train.checkpoint import list_checkpoints, read_checkpoint
from ar2diff.train.config import TrainConfig
from ar2diff.train.metrics import METRICS_NAME, StepReport
from ar2diff.train.parallel import Ranks
from ar2diff.train.trainer import Trainer

# Another processor or thread count adds in another order. The bits then differ, the losses hardly.
TOLERANCE = 0.01
COMPARED = ("diffusion_loss", "ar_loss", "distill_loss", "grad_norm")
EXACT = ("block_size", "num_tokens", "num_loss_tokens", "row_ids", "batch_sha256")


class LoggedClock:
    """Every step takes as long as it took: learning rates of a time budget depend on it."""

    def __init__(self) -> None:
        self._step_s, self._is_begun = 0.0, False

    def begin(self, step_s: float) -> None:
        """A step that takes so long."""
        self._step_s, self._is_begun = step_s, True

    def utc(self) -> datetime:
        """The epoch."""
        return datetime.fromtimestamp(0, UTC)

    def seconds(self) -> float:
        """0 when the step begins, its length from then on."""
        if self._is_begun:
            self._is_begun = False
            return 0.0
        return self._step_s


def replay_steps(run: RunFiles, count: int, result: ClaimResult) -> None:
    """Train `count` steps again and compare inputs, losses and, at saved steps, the tensor root.

    They begin at the newest checkpoint that has as many steps after it, else where training began.
    """
    started, start = run.last("train_started"), run.start_path()
    if started is None or start is None or not (run.folder / METRICS_NAME).is_file():
        what = "the model that training began at, a start of training and its step log"
        result.missing(what, found_in=LEDGER_NAME)
        return
    lines = read_object_lines(run.folder / METRICS_NAME)
    config = pydantic.TypeAdapter(TrainConfig).validate_python(started.data["config"])
    init = _choose_start(run, config, len(lines), count)
    with tempfile.TemporaryDirectory(prefix="ar2diff-replay-") as scratch:
        clock = LoggedClock()
        trainer = _build_trainer(run, config, start, init, clock, Path(scratch))
        name = "the base" if run.applied() is None else run.name(start)
        result.level = f"from {name if init is None else init.name}, {torch.get_num_threads()} threads"
        others = find_other_code(run, "")
        for logged in lines[trainer.step : trainer.step + count]:
            trainer.elapsed_s = float(logged["elapsed_s"]) - float(logged["step_s"])
            clock.begin(float(logged["step_s"]))
            report = trainer.train_step()
            if others and not _is_as_logged(report, logged):
                what = f"step {report.step}: the code that trained: another one is installed here"
                result.missing(what, found=others[0], found_in=METRICS_NAME)
                return
            _compare_step(report, logged, result)
            _compare_root(run, trainer, result)


def _choose_start(run: RunFiles, config: TrainConfig, num_steps: int, count: int) -> Path | None:
    # A time budget's first rate after a start depends on the step before it, which only the first start knows.
    if config.steps is None:
        return None
    found = [path for path in list_checkpoints(run.folder) if _step_of(path) + count <= num_steps]
    return found[-1] if found else None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _build_trainer(
    run: RunFiles, config: TrainConfig, start: Path, init: Path | None, clock: LoggedClock, scratch: Path
) -> Trainer:
    stream = RowStream(run.folder / DATA_DIR, row_len=config.row_len, seed=config.seed)
    loaded = load_model(start, dtype=torch.float32)
    trainer = Trainer(config, loaded, stream, scratch, clock=clock, ledger=None, progress=None, ranks=Ranks())
    if init is not None:
        trainer.resume(init, *read_checkpoint(init))
    trainer.decoder.train()
    return trainer


def _is_as_logged(report: StepReport, logged: dict[str, Any]) -> bool:
    scratch = ClaimResult(id="", title="")
    _compare_step(report, logged, scratch)
    return scratch.verdict == "pass"


def _compare_step(report: StepReport, logged: dict[str, Any], result: ClaimResult) -> None:
    here = {"claimed_in": f"{METRICS_NAME} step {report.step}", "found_in": "trained again"}
    found = {name: getattr(report, name) for name in (*EXACT, *COMPARED)}
    found["row_ids"] = list(found["row_ids"])
    inputs = {name: logged.get(name) for name in EXACT}
    result.equal(f"step {report.step}: inputs", inputs, {name: found[name] for name in EXACT}, **here)
    for name in COMPARED:
        result.holds(
            f"step {report.step}: {name}",
            _is_near(logged.get(name), found[name]),
            claimed=logged.get(name),
            found=found[name],
            **here,
        )


def _is_near(logged: object, found: object) -> bool:
    if isinstance(logged, float) and isinstance(found, float):
        return math.isclose(logged, found, rel_tol=TOLERANCE, abs_tol=1e-6)
    return logged == found


def _compare_root(run: RunFiles, trainer: Trainer, result: ClaimResult) -> None:
    """Equal bits where the same processor adds in the same order; otherwise the losses alone speak."""
    saved = [event for event in run.find("checkpoint_saved") if event.data.get("step") == trainer.step]
    if not saved:
        return
    if trainer.mask_row is not None:
        trainer.mask_row.write_back()
    root = root_of_decoder(trainer.decoder, trainer.loaded.hf_config)
    here = {"claimed_in": line_of(saved[-1]), "found_in": "trained again"}
    same = root == saved[-1].data.get("tensor_root")
    result.level += f"; step {trainer.step}: {'the same bits' if same else 'other bits, near losses'}"
    if same:
        result.equal(f"step {trainer.step}: tensor root", saved[-1].data.get("tensor_root"), root, **here)
