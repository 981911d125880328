"""The evaluation stage: parent and child, every mode, one table, samples kept and hashed into the ledger."""

import gc
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch

from ar2diff import __version__
from ar2diff.engine.engine import Engine
from ar2diff.errors import CheckpointError
from ar2diff.evals.likelihood import measure_bits
from ar2diff.evals.modes import EvalMode, build_modes
from ar2diff.evals.report import EvalReport
from ar2diff.evals.run import Contestants, answer_problem
from ar2diff.evals.scores import Answer
from ar2diff.files import write_json, write_text
from ar2diff.hashing import sha256_file
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.loading import LoadedModel, load_model
from ar2diff.pipelines.recipe import EvaluationConfig
from ar2diff.pipelines.stages import RunContext, build_problems
from ar2diff.tasks.problem import Problem

REPORT_NAME, SAMPLES_NAME = "eval.json", "eval_samples.jsonl"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def evaluate_run(base: Path, checkpoint: Path, config: EvaluationConfig, context: RunContext) -> EvalReport:
    """Compare a checkpoint with its base; writes eval.json and eval_samples.jsonl into the run.

    Raises:
        CheckpointError: `checkpoint` is not a converted model.
    """
    context.view.stage("Evaluating")
    problems = build_problems(config.problems)
    modes = build_modes(config.modes, config.steps, config.thresholds)
    bits, roots, diffusion = _measure_bits(base, checkpoint, problems[: config.bits_problems])
    dtype = DTYPES[config.precision]
    parent, child = load_model(base, dtype=dtype), load_model(checkpoint, dtype=dtype)
    contestants = Contestants(
        parent=Engine(parent, clock=context.clock),
        converted=Engine(child, clock=context.clock),
        tokenizer=child.tokenizer,
    )
    answers = _ask(contestants, problems, modes, config, context)
    about = {
        "roots": roots,
        "diffusion": diffusion.as_json(),
        "settings": {**asdict(config), "problems": [asdict(share) for share in config.problems]},
        "machine": describe_machine(),
    }
    report = EvalReport(answers=tuple(answers), bits_per_token=_bits_by_mode(bits, modes), about=about)
    _write_report(report, roots, context)
    return report


def describe_machine() -> dict[str, object]:
    """What speed figures depend on: processor, threads, versions."""
    return {
        "processor": _processor_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "ar2diff": __version__,
    }


def _processor_name() -> str:
    # platform.processor() is empty on many Linux machines.
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _measure_bits(
    base: Path, checkpoint: Path, problems: Sequence[Problem]
) -> tuple[dict[str, float], dict[str, str], DiffusionConfig]:
    """Bits by name, in fp32; one model in memory at a time."""
    child = load_model(checkpoint)
    if child.diffusion is None:
        raise CheckpointError("not a converted model", given=str(checkpoint), fix="Name a checkpoint of a run")
    bits: dict[str, float] = {}
    roots = {"converted": child.tensor_root}
    if problems:
        measured = measure_bits(child, child.diffusion, problems, seed=0)
        bits |= {"ar": measured.causal, "diffusion": measured.diffusion}
    diffusion = child.diffusion
    del child
    gc.collect()
    parent: LoadedModel = load_model(base)
    roots["parent"] = parent.tensor_root
    if problems:
        bits["parent"] = measure_bits(parent, diffusion, problems, seed=0, num_draws=1).causal
    return bits, roots, diffusion


def _bits_by_mode(bits: dict[str, float], modes: Sequence[EvalMode]) -> dict[str, float]:
    return {mode.name: bits[_bits_kind(mode)] for mode in modes if _bits_kind(mode) in bits}


def _bits_kind(mode: EvalMode) -> str:
    if mode.parent:
        return "parent"
    return "diffusion" if mode.mode == "diffusion" else "ar"


def _ask(
    contestants: Contestants,
    problems: Sequence[Problem],
    modes: Sequence[EvalMode],
    config: EvaluationConfig,
    context: RunContext,
) -> list[Answer]:
    """All answers, or those of the first problems that fit into the time budget; at least one problem is asked."""
    started_s, answers = context.clock.seconds(), list[Answer]()
    for idx, problem in enumerate(problems):
        elapsed_s = context.clock.seconds() - started_s
        if config.minutes is not None and idx and elapsed_s * (idx + 1) / idx > config.minutes * 60:
            break
        for mode in modes:
            answers.append(
                answer_problem(contestants, problem, mode, max_tokens=config.max_tokens, clock=context.clock)
            )
            context.view.evaluation(len(answers), len(problems) * len(modes), mode.name)
    return answers


def _write_report(report: EvalReport, roots: dict[str, str], context: RunContext) -> None:
    samples = context.run_dir / SAMPLES_NAME
    write_text(samples, "".join(json.dumps(a.as_json(), ensure_ascii=False) + "\n" for a in report.answers))
    write_json(context.run_dir / REPORT_NAME, report.as_json())
    context.ledger.append(
        "evaluate",
        {
            "roots": roots,
            "report": {"path": REPORT_NAME, "sha256": sha256_file(context.run_dir / REPORT_NAME)},
            "samples": {"path": SAMPLES_NAME, "sha256": sha256_file(samples)},
        },
    )
