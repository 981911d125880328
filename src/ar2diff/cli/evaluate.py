"""`ar2diff evaluate`: a converted model beside its parent, in every mode, in one table."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ar2diff.cli.numbers import Floats, Integers

if TYPE_CHECKING:
    from ar2diff.pipelines.served_answers import ServedEngine


def evaluate(
    checkpoint: Path,
    *,
    base: Path,
    out: Path,
    tasks: tuple[str, ...] = ("structured?count=24", "reasoning?count=8"),
    modes: str = "parent,ar,verified,verified+copies,diffusion",
    steps: Integers = (1, 2, 4, 8),
    thresholds: Floats = (0.9,),
    max_tokens: int = 128,
    minutes: float | None = None,
    precision: Literal["fp32", "bf16", "int8", "auto"] = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
    batch_size: int = 1,
    server: str | None = None,
    server_log: Path | None = None,
) -> None:
    """Compare a checkpoint with the model it was converted from: accuracy, agreement, likelihood, speed.

    Args:
        checkpoint: The converted model.
        base: The model it was converted from, a folder or a .gguf file.
        out: The run directory that gets eval.json and eval_samples.jsonl; its documents are written anew.
        tasks: TASK[?count=N&start=N&source=SOURCE], held-out problems; the rows of a stored benchmark as local:FILE.
        modes: Comma-separated out of parent, ar, verified, verified+copies, diffusion.
        steps: Denoising steps of the diffusion modes, as 1,2,4.
        thresholds: Confidence thresholds of the diffusion modes, as 0.7,0.9.
        max_tokens: Longer answers count as cut off.
        minutes: Ask problems until this time is spent.
        precision: fp32, bf16, int8, or auto, of both models.
        device: cpu or cuda.
        batch_size: Problems asked together: faster, and the speed shown is that of a batch.
        server: Address of a server that holds the checkpoint and gives its answers, its key in AR2DIFF_API_KEYS; the
            audit then ties each answer to its request.
        server_log: The file that the server's --request-log names; its lines of these answers are kept in the run.
    """
    from ar2diff.cli.open_run import open_run
    from ar2diff.cli.run import print_table
    from ar2diff.data.config import parse_evaluation_share
    from ar2diff.pipelines.evaluation import check_model_paths, evaluate_run
    from ar2diff.pipelines.recipe import EvaluationConfig
    from ar2diff.pipelines.stages import check_device

    config = EvaluationConfig(
        problems=tuple(parse_evaluation_share(text) for text in tasks),
        modes=modes,
        steps=steps,
        thresholds=thresholds,
        max_tokens=max_tokens,
        minutes=minutes,
        precision=precision,
        batch_size=batch_size,
    )
    check_device(device)
    check_model_paths(base, checkpoint)
    with open_run(out, device=device) as context:
        served = None if server is None else open_server(server, checkpoint, server_log)
        report = evaluate_run(base, checkpoint, config, context, served=served)
    print_table(report)


def open_server(address: str, checkpoint: Path, log: Path | None) -> "ServedEngine":
    """The server at an address, as an engine; the first key of the environment opens it."""
    import os

    from ar2diff.audit.live.server import LiveServer
    from ar2diff.cli.serve import KEYS_VARIABLE
    from ar2diff.pipelines.served_answers import ServedEngine

    key = next(iter(os.environ.get(KEYS_VARIABLE, "").split()), None)
    return ServedEngine(LiveServer(address, api_key=key), checkpoint, log=log)
