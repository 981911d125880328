"""`ar2diff train`: convert a base model with prepared data, or go on with a run that stopped."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ar2diff.models.adapters import AdapterConfig
    from ar2diff.train.config import TrainConfig
    from ar2diff.train.metrics import TrainProgress
    from ar2diff.train.objective import ObjectiveConfig
    from ar2diff.train.parallel import Ranks
    from ar2diff.train.trainer import TrainResult

INTERRUPT_EXIT_CODE = 130


def train(
    base: Path = Path("base"),
    *,
    data: Path = Path("data"),
    out: Path,
    steps: int | None = None,
    minutes: float | None = None,
    micro: int = 8,
    accum: int = 1,
    save_every: int | None = None,
    init: Path | None = None,
    preset: str = "ar2diff",
    block_size: int | None = None,
    ar_weight: float | None = None,
    all_mask_share: float | None = None,
    distill_weight: float | None = None,
    adapter_rank: int | None = None,
    adapter_alpha: float | None = None,
    lr: float = 1e-4,
    row_len: int = 512,
    keep_last: int = 3,
    precision: Literal["fp32", "bf16"] = "fp32",
    recompute: Literal["none", "mlp", "layer"] = "mlp",
    compiled: bool = False,
    fused_loss: bool = False,
    tensor_parallel: int = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    seed: int = 0,
    tensorboard: bool = False,
) -> int:
    """Convert a model into a block-diffusion model.

    Several processes share the work when started by torchrun: torchrun --nproc-per-node 2 -m ar2diff train ...

    Args:
        base: folder of the autoregressive model, or its .gguf file.
        data: folder that `ar2diff prepare` wrote.
        out: folder of the run; checkpoints go to OUT/checkpoints.
        steps: optimizer steps; give this or --minutes.
        minutes: time budget instead of steps.
        micro: rows per micro-batch.
        accum: micro-batches per optimizer step.
        save_every: steps between checkpoints; the end is always saved.
        init: checkpoint of this run to go on from, with the same settings; or the run's folder, for its newest
            checkpoint that is whole.
        preset: objective to start from: ar2diff, draft, bd3lm, dllm, fast-dllm-v2, i-dlm, opdlm or sdar.
        block_size: tokens per diffusion block, in place of the preset's.
        ar_weight: weight of the next-token loss, in place of the preset's.
        all_mask_share: share of blocks masked whole, in place of the preset's.
        distill_weight: weight of the divergence from the base's own predictions, in place of the preset's.
        adapter_rank: train a mask-gated adapter of this rank and leave the base as it is; needs --ar-weight 0.
        adapter_alpha: scale of the adapter's update, twice the rank unless given.
        lr: peak learning rate.
        row_len: positions of a packed row.
        keep_last: checkpoints to keep.
        precision: fp32, or bf16 products with fp32 weights.
        recompute: what backward passes compute again to save memory: nothing, the inside of MLPs, or whole layers.
        compiled: run MLPs and norms through torch.compile.
        fused_loss: use the loss kernel of the extra "gpu" where it can be used.
        tensor_parallel: under torchrun, how many ranks share each matrix; the others share the rows.
        device: cpu or cuda.
        seed: of row order and noise.
        tensorboard: also write the steps to OUT/tensorboard; needs the extra train.
    """
    from ar2diff.errors import RankError
    from ar2diff.train.config import TrainConfig
    from ar2diff.train.optim import OptimConfig

    weights = {"ar_weight": ar_weight, "distill_weight": distill_weight}
    config = TrainConfig(
        objective=_read_objective(preset, block_size, all_mask_share, weights),
        optim=OptimConfig(lr=lr),
        steps=steps,
        minutes=minutes,
        micro=micro,
        accum=accum,
        row_len=row_len,
        save_every=save_every,
        keep_last=keep_last,
        precision=precision,
        recompute=recompute,
        compiled=compiled,
        fused_loss=fused_loss,
        seed=seed,
        adapter=_read_adapter(adapter_rank, adapter_alpha),
    )
    try:
        result = _run(config, base, data, out, init, device, tensor_parallel=tensor_parallel, tensorboard=tensorboard)
    except RankError as error:
        # The process that refused says why.
        return error.exit_code
    return _show_end(result)


def _show_end(result: "TrainResult | None") -> int:
    # The exit status; only the first process of a parallel job has something to say.
    if result is None:
        return 0
    print(f"{result.checkpoint}")
    if result.interrupted:
        print(f"stopped after step {result.steps}; go on with the same command and --init {result.checkpoint}")
        return INTERRUPT_EXIT_CODE
    return 0


def _read_objective(
    preset: str, block_size: int | None, all_mask_share: float | None, weights: Mapping[str, float | None]
) -> "ObjectiveConfig":
    """The preset with what the flags change; None leaves it as it is."""
    from dataclasses import replace

    from ar2diff.train.objective import find_preset

    objective = find_preset(preset)
    chosen: dict[str, Any] = {name: value for name, value in weights.items() if value is not None}
    objective = replace(objective, **chosen)
    if block_size is not None:
        objective = replace(objective, block_sizes=(block_size,))
    if all_mask_share is not None:
        objective = replace(objective, noise=replace(objective.noise, all_mask_share=all_mask_share))
    return objective


def _read_adapter(rank: int | None, alpha: float | None) -> "AdapterConfig | None":
    from ar2diff.errors import ConfigError
    from ar2diff.models.adapters import AdapterConfig

    if rank is not None:
        return AdapterConfig(rank=rank, alpha=2.0 * rank if alpha is None else alpha)
    if alpha is not None:
        raise ConfigError("an adapter needs a rank", given=f"--adapter-alpha {alpha}", fix="Add --adapter-rank")
    return None


def _join(device: str, tensor_parallel: int) -> "Ranks":
    from ar2diff.errors import ConfigError
    from ar2diff.train.parallel import Ranks

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Ranks.join(device, tensor_parallel)
    if tensor_parallel != 1:
        raise ConfigError(
            "tensor parallelism needs several processes",
            given=f"--tensor-parallel {tensor_parallel}",
            fix="Start them by torchrun --nproc-per-node N -m ar2diff train ...",
        )
    return Ranks()


def _run(
    config: "TrainConfig",
    base: Path,
    data: Path,
    out: Path,
    init: Path | None,
    device: str,
    *,
    tensor_parallel: int,
    tensorboard: bool,
) -> "TrainResult | None":
    # None for all but the first process of a parallel job, which alone keeps the ledger and shows progress.
    from ar2diff.cli.allocator import keep_freed_memory
    from ar2diff.cli.doctor import say_targets
    from ar2diff.cli.open_ledger import open_ledger
    from ar2diff.cli.train_bar import TrainBar
    from ar2diff.clock import SystemClock
    from ar2diff.pipelines.evaluation import check_model_paths
    from ar2diff.pipelines.stages import check_device, write_documents
    from ar2diff.pipelines.targets import record_targets
    from ar2diff.train.board import BoardProgress
    from ar2diff.train.trainer import train as run_training

    check_device(device)
    keep_freed_memory()
    clock = SystemClock()
    ranks = _join(device, tensor_parallel)
    with ExitStack() as stack:
        stack.callback(ranks.leave)
        ledger = None
        progress: TrainProgress | None = None
        with ranks.agreed():
            check_model_paths(base)
            if ranks.is_first:
                say_targets(base, config)
                ledger = stack.enter_context(open_ledger(out, clock=clock, run_id=out.resolve().name))
                bar = stack.enter_context(TrainBar())
                progress = stack.enter_context(BoardProgress(out, bar)) if tensorboard else bar
        asked = stack.enter_context(stop_on_ctrl_c())
        result = run_training(
            config,
            base,
            data,
            out,
            clock=clock,
            ledger=ledger,
            progress=progress,
            init=init,
            device=device,
            stop_requested=lambda: bool(asked),
            ranks=ranks,
        )
        if ledger is not None:
            record_targets(result.checkpoint, ledger)
            write_documents(out)
    return result if ranks.is_first else None


@contextmanager
def stop_on_ctrl_c() -> Iterator[list[int]]:
    """Ctrl-C asks the run to stop after its step, which the yielded list then shows; a second one stops at once."""
    asked: list[int] = []

    def ask(number: int, _: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
