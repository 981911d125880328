"""`ar2diff harness`: tasks of lm-evaluation-harness on one model, in any mode."""

from pathlib import Path
from typing import Literal


def harness(
    checkpoint: Path,
    *,
    out: Path,
    tasks: tuple[str, ...],
    include: Path | None = None,
    mode: Literal["ar", "verified", "diffusion"] = "ar",
    steps: int | None = None,
    threshold: float | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    max_tokens: int = 256,
    precision: Literal["fp32", "bf16", "int8", "auto"] = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
) -> None:
    """Ask a model tasks of lm-evaluation-harness; figures and samples are kept in the run and audited with it.

    Data sets of lm-eval's own tasks are downloaded by lm-eval; tasks in local files need nothing.

    Args:
        checkpoint: The model, converted or not.
        out: The run directory that gets harness.json and harness_samples.jsonl.
        tasks: Names of lm-eval's tasks; may be repeated.
        include: Folder of further task files, which may run code: only your own.
        mode: ar, verified or diffusion.
        steps: Denoising steps of the diffusion mode.
        threshold: Confidence threshold of the diffusion mode.
        num_fewshot: Worked examples before each question; the task's own number unless given.
        limit: Questions a task at most.
        chat: Put prompts into the model's chat template.
        max_tokens: Of an answer whose task names no limit.
        precision: fp32, bf16, int8, or auto.
        device: cpu or cuda.
    """
    from ar2diff.cli.open_run import open_run
    from ar2diff.pipelines.evaluation import check_model_paths
    from ar2diff.pipelines.harness import HarnessConfig, evaluate_with_harness
    from ar2diff.pipelines.stages import check_device

    config = HarnessConfig(
        tasks=tasks,
        include=None if include is None else str(include),
        mode=mode,
        denoising_steps=steps,
        confidence_threshold=threshold,
        num_fewshot=num_fewshot,
        limit=limit,
        chat=chat,
        max_tokens=max_tokens,
        precision=precision,
    )
    check_device(device)
    check_model_paths(checkpoint)
    with open_run(out, device=device) as context:
        content = evaluate_with_harness(checkpoint, config, context)
    for name, task in content["tasks"].items():
        for metric, value in task["results"].items():
            print(f"{name}  {metric.partition(',')[0]}  {value}  ({task['num_samples']} samples)")
