"""The training loop: from a base model and prepared data to a converted checkpoint.

A run lives in one folder: `run.json` (what it is), `metrics.jsonl`, `loss.png`, `checkpoints/`. It goes on only where
a checkpoint is named, and then exactly as if it had never stopped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ar2diff.clock import Clock
from ar2diff.data.pipeline import fingerprint_tokenizer
from ar2diff.data.stream import RowStream
from ar2diff.diffusion.fused import refuse_fused
from ar2diff.errors import Ar2diffError, TrainingError
from ar2diff.hashing import sha256_json
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import LoadedModel, load_model, named_tensors
from ar2diff.models.roots import root_of_tensors
from ar2diff.provenance.environment import CODE_EVENT, describe_code
from ar2diff.provenance.ledger import Ledger
from ar2diff.train.averaging import write_average
from ar2diff.train.batch import TrainingBatch
from ar2diff.train.budget import Budget
from ar2diff.train.checkpoint import (
    TrainingState,
    list_good_checkpoints,
    read_checkpoint,
    read_state_digest,
)
from ar2diff.train.config import TrainConfig
from ar2diff.train.divergence import DIVERGED_DIR, divergence_error, is_sound, save_divergence, unsound_gradients
from ar2diff.train.mask_row import MaskRow, measure_mask_row
from ar2diff.train.metrics import (
    MetricsLog,
    SilentTrainProgress,
    StepReport,
    TrainProgress,
    digest_metrics,
    draw_losses,
)
from ar2diff.train.optim import (
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    set_learning_rate,
    trained_parameters,
)
from ar2diff.train.parallel import Ranks
from ar2diff.train.recompute import compile_layers, set_recompute
from ar2diff.train.restore import restore, root_of_live
from ar2diff.train.saving import save_step
from ar2diff.train.setup import (
    build_distillation,
    build_settings,
    check_documents,
    check_space,
    check_state,
    describe_resumed,
    describe_training,
    enter_run,
    find_start,
    load_teacher,
    prepare_base,
)
from ar2diff.train.step import StepLosses, accumulate_gradients
from ar2diff.train.step_batches import build_step_batches
from ar2diff.train.traces import Traces

AVERAGED_DIR = "averaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended: its last checkpoint, that model's tensor root, and whether it was stopped early."""

    checkpoint: Path
    tensor_root: str
    steps: int
    elapsed_s: float
    interrupted: bool


def train(
    config: TrainConfig,
    base: Path,
    data_dir: Path,
    out_dir: Path,
    *,
    clock: Clock,
    ledger: Ledger | None = None,
    progress: TrainProgress | None = None,
    init: Path | None = None,
    device: str = "cpu",
    stop_requested: Callable[[], bool] = lambda: False,
    ranks: Ranks | None = None,
    base_source: str | None = None,
    traces: Path | None = None,
    teacher: Path | None = None,
) -> TrainResult:
    """Convert `base` with the documents of `data_dir`; everything is written into `out_dir`.

    Args:
        init: a checkpoint of the same run to go on from, or a run's folder: then its newest one that is whole.
        stop_requested: asked between steps; True saves a checkpoint and ends the run early.
        ranks: of a parallel job, each calling this with the same arguments; files, ledger and progress are rank 0's.
        base_source: where the base came from, for the ledger; its path by default.
        traces: how the data's documents were decoded, as `train.traces` says; masks are taken from there.
        teacher: the model to distil from; by default the base as it is at the start.

    Raises:
        RunError: `out_dir` holds another run, or this one without `init`, or `init` is of another run.
        CheckpointError: `init` is incomplete or damaged.
        DataError: `data_dir` was changed after it was made, or made with another tokenizer.
        TrainingError: a loss or gradient is not finite, or another rank is gone; the last checkpoint stays.
        RankError: another rank of the job has raised one of these before the first step.
    """
    ranks = ranks or Ranks()
    ledger, progress = (ledger, progress) if ranks.is_first else (None, None)
    init, is_frozen = find_start(init, ranks, ledger), config.adapter is not None
    # What a rank refuses, all refuse: none is left waiting for it.
    with ranks.agreed():
        ranks.check(config.accum)
        saved = None if init is None else read_checkpoint(init)
        loaded = load_model(base, device=ranks.load_device(device, is_frozen=is_frozen))
        ranks.check_model(loaded.config, is_frozen=is_frozen)
        config_sha256 = sha256_json(config.as_json())
        check_state(saved[0] if saved else None, loaded.tensor_root, config_sha256, init)
        stream = RowStream(data_dir, row_len=config.row_len, seed=config.seed)
        stream.verify(tokenizer_sha256=fingerprint_tokenizer(loaded.tokenizer))
        check_documents(stream, loaded, config.objective)
    with ranks.agreed():
        if ranks.is_first:
            check_space(loaded, out_dir, is_frozen=is_frozen, in_parts=ranks.count > 1 and not is_frozen)
            enter_run(out_dir, config, loaded.tensor_root, config_sha256, resuming=saved is not None)
    live_root = root_of_tensors(named_tensors(loaded.decoder, loaded.hf_config))
    base_root = loaded.tensor_root
    with ranks.agreed():
        trainer = Trainer(
            config,
            loaded,
            stream,
            out_dir,
            clock=clock,
            ledger=ledger,
            progress=progress,
            ranks=ranks,
            traces=None if traces is None else Traces(traces, stream),
            teacher=None if teacher is None else load_teacher(teacher, device, loaded),
        )
    resumed = None
    with ranks.agreed():
        if init is not None and saved is not None:
            trainer.resume(init, *saved)
            # Every rank takes part: it may hold parts of the weights.
            resumed = describe_resumed(init, root_of_live(trainer.decoder, trainer.loaded.hf_config, ranks))
    with ranks.agreed():
        if ledger is not None:
            ledger.append(CODE_EVENT, describe_code())
            roots = {"base_tensor_root": base_root, "live_tensor_root": live_root, "missing": [], "unexpected": []}
            described = describe_training(config, trainer.loaded, trainer.mask_token_id, trainer.loss_refusal)
            started = {"config": config.as_json(), "base": base_source or str(base), **roots, **described}
            ledger.append("train_started", {**started, "step": trainer.step, "resumed": resumed})
    with ranks.named_loss():
        return trainer.run(stop_requested)


class Trainer:
    """One run in memory: model, optimizer, position in the data."""

    def __init__(
        self,
        config: TrainConfig,
        loaded: LoadedModel,
        stream: RowStream,
        out_dir: Path,
        *,
        clock: Clock,
        ledger: Ledger | None,
        progress: TrainProgress | None,
        ranks: Ranks,
        traces: Traces | None = None,
        teacher: Decoder | None = None,
    ) -> None:
        self.ranks = ranks
        self.config, self.out_dir = config, out_dir
        self.base_tensor_root = loaded.tensor_root
        self.loaded, self.mask_token_id = prepare_base(loaded, config)
        self.decoder = self.loaded.decoder
        self.distillation = build_distillation(config, self.decoder, teacher)
        set_recompute(self.decoder, config.recompute)
        if config.compiled:
            compile_layers(self.decoder)
        ranks.shard(self.decoder)
        if self.distillation is not None and self.distillation.parent is not None:
            ranks.shard(self.distillation.parent)
        self.mask_row = MaskRow(self.decoder, self.mask_token_id) if config.optim.freeze_embeddings else None
        device = self.decoder.embedding.weight.device
        self.loss_refusal = refuse_fused(device, config.precision) if config.fused_loss else None
        self.parameters = trained_parameters(self.decoder, self.mask_row)
        self.optimizer = build_optimizer(self.parameters, config.optim)
        self.step, self.elapsed_s = 0, 0.0
        self._block_sizes_done: set[int] = set()
        self._stream, self._clock, self._ledger = stream, clock, ledger
        self._traces = traces
        self._budget = Budget(steps=config.steps, minutes=config.minutes)
        self._progress = progress or SilentTrainProgress()
        self._last_step_s = 0.0

    def resume(self, init: Path, state: TrainingState, optimizer: dict[str, torch.Tensor]) -> None:
        """Take weights, optimizer and position over from a checkpoint.

        Raises:
            CheckpointError: its tensors are not this run's.
        """
        # A run stopped before its first step, or before a token was masked under an adapter, has no moments yet.
        moments = optimizer or None
        hf_config = self.loaded.hf_config
        restore(init, self.decoder, hf_config, self.optimizer, self.parameters, moments=moments, ranks=self.ranks)
        if self.mask_row is not None:
            self.mask_row.read_again()
        self.step, self.elapsed_s = state.step, state.elapsed_s
        self._block_sizes_done = set(state.block_sizes_done)

    def run(self, stop_requested: Callable[[], bool]) -> TrainResult:
        """Train to the end of the budget, or until asked to stop; always ends with a checkpoint."""
        with self.ranks.agreed():
            metrics = MetricsLog(self.out_dir, step=self.step) if self.ranks.is_first else None
        self.decoder.train()
        saved: tuple[Path, str] | None = None
        interrupted = False
        while not self._is_over() and not (interrupted := self._is_stopped(stop_requested)):
            report = self.train_step()
            if metrics is not None:
                metrics.append(report)
            self._progress.step_done(report)
            due = self.config.save_every is not None and self.step % self.config.save_every == 0
            saved = self.save() if due else None
        checkpoint, root = saved or self.save()
        if self.ranks.is_first:
            draw_losses(self.out_dir)
            self._average()
        if self._ledger is not None:
            event = "train_interrupted" if interrupted else "train_finished"
            data = {
                "step": self.step,
                "elapsed_s": self.elapsed_s,
                "tensor_root": root,
                "checkpoint": checkpoint.name,
            }
            self._ledger.append(event, {**data, "metrics_sha256": digest_metrics(self.out_dir)})
        return TrainResult(
            checkpoint=checkpoint,
            tensor_root=root,
            steps=self.step,
            elapsed_s=self.elapsed_s,
            interrupted=interrupted,
        )

    def _is_stopped(self, stop_requested: Callable[[], bool]) -> bool:
        return bool(self.ranks.first_value(float(stop_requested())))

    def _is_over(self) -> bool:
        return self._budget.is_over(self.step, self.elapsed_s, self._last_step_s)

    def _average(self) -> None:
        if self.config.average_last:
            checkpoints = list_good_checkpoints(
                self.out_dir, self.config.average_last, up_to=self.step, ledger=self._ledger
            )
            averaged = write_average(self.out_dir / AVERAGED_DIR, checkpoints)
            if self._ledger is not None:
                self._ledger.append("checkpoints_averaged", averaged)

    def train_step(self) -> StepReport:
        """One optimizer step.

        Raises:
            TrainingError: loss or gradient is not finite, or the loss is beyond its bound; nothing was changed.
        """
        started_s = self._clock.seconds()
        progress = self._budget.share_after(self.step, self.elapsed_s, self._last_step_s)
        share = self._budget.share_before(self.step, self.elapsed_s)
        block_size = self.config.objective.block_size_at(self.step, share, seed=self.config.seed)
        batches = self._build_batches(block_size)
        losses = accumulate_gradients(
            self.decoder,
            batches,
            ar_weight=self.config.objective.ar_weight,
            mask_token_id=self.mask_token_id,
            precision=self.config.precision,
            diffusion_weight=self.config.objective.diffusion_weight,
            distillation=self.distillation,
            ranks=self.ranks,
            fused=self.config.fused_loss and self.loss_refusal is None,
        )
        norm = self.ranks.clip_gradients(self.parameters.values(), self.config.optim.clip_norm)
        if not is_sound(losses, norm, max_loss=self.config.max_loss):
            raise self._diverged(losses, norm, batches)
        lr = learning_rate(self.config.optim, progress)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._block_sizes_done.add(block_size)
        # The budget is rank 0's clock: all ranks end after the same step.
        self._last_step_s = self.ranks.first_value(self._clock.seconds() - started_s)
        self.elapsed_s += self._last_step_s
        return self._report(losses, batches, block_size=block_size, lr=lr, grad_norm=norm, progress=progress)

    def _diverged(self, losses: StepLosses, norm: float, batches: list[TrainingBatch]) -> TrainingError:
        step = self.step + 1
        saved: Path | None = self.out_dir / DIVERGED_DIR
        kept = f"look at the batch in {saved}"
        gradients = unsound_gradients(self.parameters)
        self.optimizer.zero_grad(set_to_none=True)
        # A full disk must not hide what the user has to hear.
        try:
            if self.ranks.is_first:
                saved = save_divergence(self.out_dir, losses, norm, batches, step)
                kept = f"look at the batch in {saved}"
        except (Ar2diffError, OSError) as error:
            saved, kept = None, f"free the disk, and repeat the step: its batch could not be kept ({error})"
        try:
            if self._ledger is not None:
                name = None if saved is None else saved.name
                self._ledger.append("train_diverged", {"step": step, "batch": name, "gradients": gradients})
        except (Ar2diffError, OSError) as error:
            kept += f"; the ledger could not be written ({error})"
        return divergence_error(
            losses, norm, batches, step=step, max_loss=self.config.max_loss, gradients=gradients, kept=kept
        )

    def save(self) -> tuple[Path, str]:
        """Write a checkpoint of this step; older ones beyond `keep_last` go. Returns folder and tensor root."""
        if self.mask_row is not None:
            self.mask_row.write_back()
        state = TrainingState(
            step=self.step,
            elapsed_s=self.elapsed_s,
            base_tensor_root=self.base_tensor_root,
            config_sha256=sha256_json(self.config.as_json()),
            block_sizes_done=tuple(sorted(self._block_sizes_done)),
        )
        folder, root = save_step(
            self.out_dir,
            self.loaded,
            build_settings(self.config.objective, sorted(self._block_sizes_done), self.mask_token_id),
            optimizer_tensors(self.optimizer, self.parameters),
            state,
            keep_last=self.config.keep_last,
            ranks=self.ranks,
        )
        if self._ledger is not None:
            digest = read_state_digest(folder)
            self._ledger.append("checkpoint_saved", {"step": self.step, "tensor_root": root, "state_sha256": digest})
        self._progress.checkpoint_saved(folder)
        return folder, root

    def _build_batches(self, block_size: int) -> list[TrainingBatch]:
        return build_step_batches(
            self.config,
            self._stream,
            step=self.step,
            block_size=block_size,
            mask_token_id=self.mask_token_id,
            end_token_id=self.loaded.tokenizer.eos_token_ids[0],
            traces=self._traces,
        )

    def _report(
        self,
        losses: StepLosses,
        batches: list[TrainingBatch],
        *,
        block_size: int,
        lr: float,
        grad_norm: float,
        progress: float,
    ) -> StepReport:
        return StepReport(
            step=self.step,
            block_size=block_size,
            lr=lr,
            diffusion_loss=losses.diffusion,
            ar_loss=losses.ar,
            distill_loss=losses.distill,
            grad_norm=grad_norm,
            mask_row_norm=measure_mask_row(self.decoder, self.mask_row, self.mask_token_id),
            num_tokens=losses.num_tokens,
            num_loss_tokens=losses.num_loss_tokens,
            step_s=self._last_step_s,
            elapsed_s=self.elapsed_s,
            seconds_left=self._budget.seconds_left(self.step, self.elapsed_s, self._last_step_s),
            progress=progress,
            row_ids=tuple(row_id for batch in batches for row_id in batch.row_ids),
            batch_sha256=sha256_json([batch.digest() for batch in batches]),
        )
