"""`ar2diff train`: convert a base model with prepared data, or go on with a run that stopped."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ar2diff.train.config import TrainConfig
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
    lr: float = 1e-4,
    row_len: int = 512,
    keep_last: int = 3,
    precision: Literal["fp32", "bf16"] = "fp32",
    device: Literal["cpu", "cuda"] = "cpu",
    seed: int = 0,
) -> int:
    """Convert a model into a block-diffusion model.

    Args:
        base: folder of the autoregressive model, or its .gguf file.
        data: folder that `ar2diff prepare` wrote.
        out: folder of the run; checkpoints go to OUT/checkpoints.
        steps: optimizer steps; give this or --minutes.
        minutes: time budget instead of steps.
        micro: rows per micro-batch.
        accum: micro-batches per optimizer step.
        save_every: steps between checkpoints; the end is always saved.
        init: checkpoint of this run to go on from, with the same settings.
        preset: objective to start from: ar2diff, draft, bd3lm, dllm, fast-dllm-v2 or sdar.
        block_size: tokens per diffusion block, in place of the preset's.
        ar_weight: weight of the next-token loss, in place of the preset's.
        all_mask_share: share of blocks masked whole, in place of the preset's.
        lr: peak learning rate.
        row_len: positions of a packed row.
        keep_last: checkpoints to keep.
        precision: fp32, or bf16 products with fp32 weights.
        device: cpu or cuda.
        seed: of row order and noise.
    """
    from dataclasses import replace

    from ar2diff.train.config import TrainConfig
    from ar2diff.train.objective import find_preset
    from ar2diff.train.optim import OptimConfig

    objective = find_preset(preset)
    if block_size is not None:
        objective = replace(objective, block_sizes=(block_size,))
    if ar_weight is not None:
        objective = replace(objective, ar_weight=ar_weight)
    if all_mask_share is not None:
        objective = replace(objective, noise=replace(objective.noise, all_mask_share=all_mask_share))
    config = TrainConfig(
        objective=objective,
        optim=OptimConfig(lr=lr),
        steps=steps,
        minutes=minutes,
        micro=micro,
        accum=accum,
        row_len=row_len,
        save_every=save_every,
        keep_last=keep_last,
        precision=precision,
        seed=seed,
    )
    result = _run(config, base, data, out, init, device)
    print(f"{result.checkpoint}")
    if result.interrupted:
        print(f"stopped after step {result.steps}; go on with the same command and --init {result.checkpoint}")
        return INTERRUPT_EXIT_CODE
    return 0


def _run(config: "TrainConfig", base: Path, data: Path, out: Path, init: Path | None, device: str) -> "TrainResult":
    from ar2diff.cli.allocator import keep_freed_memory
    from ar2diff.cli.train_bar import TrainBar
    from ar2diff.clock import SystemClock
    from ar2diff.pipelines.evaluation import check_model_paths
    from ar2diff.pipelines.stages import check_device, write_documents
    from ar2diff.provenance.ledger import Ledger
    from ar2diff.train.trainer import train as run_training

    check_device(device)
    check_model_paths(base)
    keep_freed_memory()
    clock = SystemClock()
    with (
        Ledger.open(out, clock=clock, run_id=out.resolve().name) as ledger,
        TrainBar() as progress,
        stop_on_ctrl_c() as asked,
    ):
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
        )
        write_documents(out)
    return result


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
