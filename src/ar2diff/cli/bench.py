"""`ar2diff bench`: tokens a second of every mode, beside the parent and other programs, in turns within one run."""

from pathlib import Path
from typing import Literal

from ar2diff.cli.numbers import Floats, Integers


def bench(
    checkpoint: Path,
    *,
    out: Path,
    base: Path | None = None,
    tasks: tuple[str, ...] = ("structured?count=96",),
    modes: str | None = None,
    steps: Integers = (1, 2, 4, 8),
    thresholds: Floats = (0.9,),
    batch_sizes: Integers = (1, 8, 32),
    max_tokens: int = 128,
    repeats: int = 3,
    llama: Path | None = None,
    gguf: Path | None = None,
    precision: Literal["fp32", "bf16", "int8", "auto"] = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
    quick: bool = False,
) -> None:
    """Measure speed: tokens a second at several batch sizes, time to the first token, tokens a pass, passes a block.

    transformers.generate takes part where transformers is installed, llama.cpp where --llama names a folder in which
    `npm install node-llama-cpp` was run and there is a .gguf file. Who is absent is listed, with the reason.

    Args:
        checkpoint: The converted model.
        out: The run directory that gets speed.json; `ar2diff report` shows it.
        base: The model it was converted from, a folder or a .gguf file; without it the parent is left out.
        tasks: TASK[?count=N&start=N]: whose prompts are answered.
        modes: Comma-separated out of parent, ar, verified, verified+copies, diffusion; all unless given.
        steps: Denoising steps of the diffusion modes, as 1,2,4.
        thresholds: Confidence thresholds of the diffusion modes, as 0.7,0.9.
        batch_sizes: Requests at a time, as 1,8.
        max_tokens: Of an answer.
        repeats: Turns of each contestant at each batch size.
        llama: Folder with node_modules/node-llama-cpp.
        gguf: What llama.cpp runs; --base where that is a .gguf file.
        precision: fp32, bf16, int8, or auto, of our engines.
        device: cpu or cuda.
        quick: One repeat of short answers, batches of 1 and 4, 4 steps.
    """
    from ar2diff.cli.open_run import open_run
    from ar2diff.cli.run import print_table
    from ar2diff.data.config import parse_evaluation_share
    from ar2diff.pipelines.bench import BenchConfig, Peers, bench_run
    from ar2diff.pipelines.evaluation import check_model_paths
    from ar2diff.pipelines.stages import check_device

    chosen = modes or (
        "ar,verified,verified+copies,diffusion" if base is None else "parent,ar,verified,verified+copies,diffusion"
    )
    config = BenchConfig(
        problems=tuple(parse_evaluation_share(text) for text in tasks),
        modes=chosen,
        steps=(4,) if quick else steps,
        thresholds=thresholds,
        batch_sizes=(1, 4) if quick else batch_sizes,
        max_tokens=min(max_tokens, 16) if quick else max_tokens,
        repeats=1 if quick else repeats,
        precision=precision,
    )
    check_device(device)
    check_model_paths(*([checkpoint] if base is None else [checkpoint, base]))
    is_gguf = base is not None and base.suffix == ".gguf"
    peers = Peers(llama=llama, gguf=gguf or (base if is_gguf else None))
    with open_run(out, device=device) as context:
        report = bench_run(checkpoint, base, config, peers, context)
    print_table(report)
