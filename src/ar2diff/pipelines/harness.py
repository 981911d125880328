"""Tasks of lm-evaluation-harness on one model: figures and samples go into the run, their digests into its ledger."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ar2diff.engine.engine import Engine
from ar2diff.engine.loading import LoadPrecision, check_precision, load_engine
from ar2diff.engine.request import check_request
from ar2diff.errors import ConfigError
from ar2diff.evals.modes import EvalMode, build_modes
from ar2diff.evals.run import build_request
from ar2diff.files import write_json, write_text
from ar2diff.hashing import sha256_file
from ar2diff.pipelines.evaluation import describe_engine, describe_machine, torch_threads
from ar2diff.pipelines.stages import RunContext
from ar2diff.tasks.table import TASKS
from ar2diff.train.checkpoint import OPTIMIZER_NAME, is_checkpoint, verify_checkpoint

HARNESS_EVENT = "harness"
REPORT_NAME, SAMPLES_NAME = "harness.json", "harness_samples.jsonl"
# Of a task's settings, what its figures follow from.
KEPT_SETTINGS = (
    "output_type",
    "metric_list",
    "num_fewshot",
    "generation_kwargs",
    "repeats",
    "filter_list",
    "target_delimiter",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessConfig:
    """What is asked.

    Attributes:
        tasks: names that lm-eval knows, or that the files in `include` define.
        include: folder of further task files; they may run code of their own, so they must be trusted.
        mode: ar, verified or diffusion.
        denoising_steps, confidence_threshold: of the diffusion mode: one of them.
        num_fewshot: worked examples before each question; None is the task's own number.
        limit: questions a task at most.
        chat: put prompts into the model's chat template.
        max_tokens: of an answer whose task names no limit.
        precision: fp32, bf16, int8 or auto.
    """

    tasks: tuple[str, ...]
    include: str | None = None
    mode: str = "ar"
    denoising_steps: int | None = None
    confidence_threshold: float | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    chat: bool = False
    max_tokens: int = 256
    precision: LoadPrecision = "auto"

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if not self.tasks:
            raise ConfigError("no task to evaluate", fix="Name one with --tasks")
        for name, least in (("limit", 1), ("max_tokens", 1), ("num_fewshot", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}", given=value)
        self.build_mode()

    def build_mode(self) -> EvalMode:
        """The mode asked for.

        Raises:
            ConfigError: unknown, or several at once.
        """
        steps = () if self.denoising_steps is None else (self.denoising_steps,)
        thresholds = () if self.confidence_threshold is None else (self.confidence_threshold,)
        if self.mode == "diffusion" and not steps and not thresholds:
            thresholds = (0.9,)
        modes = build_modes(self.mode, steps, thresholds)
        if len(modes) != 1:
            raise ConfigError("one mode at a time", given=", ".join(mode.name for mode in modes))
        return modes[0]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "tasks": list(self.tasks)}


def evaluate_with_harness(checkpoint: Path, config: HarnessConfig, context: RunContext) -> dict[str, Any]:
    """Ask a model lm-eval's tasks; writes harness.json and harness_samples.jsonl, returns the former's content.

    Raises:
        CheckpointError: the checkpoint's files were changed.
        ConfigError: lm-eval is not installed or knows no such task.
        RequestError: the model cannot decode in this mode.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError("these tasks are those of lm-eval", fix="Install ar2diff[eval]")
    context.view.stage("Evaluating with lm-eval")
    if is_checkpoint(checkpoint):
        verify_checkpoint(checkpoint, skip=(OPTIMIZER_NAME,))
    engine = load_engine(
        checkpoint,
        config.precision,
        clock=context.clock,
        library_dir=context.library_dir,
        device=context.device,
        num_threads=torch.get_num_threads(),
    )
    mode = config.build_mode()
    check_request(build_request(mode, (0,), max_tokens=1), engine.loaded.config, engine.loaded.diffusion)
    with torch_threads(1 if engine.runner.rows_are_independent else torch.get_num_threads()):
        found = _ask(engine, mode, config)
    content = {
        "about": {
            "root": engine.loaded.tensor_root,
            "mode": mode.name,
            "settings": config.as_json(),
            "engine": describe_engine(engine),
            "machine": describe_machine(context.device),
            "lm_eval": metadata.version("lm-eval"),
        },
        "tasks": {name: _describe_task(name, found) for name in found["samples"]},
    }
    _write(content, list(_list_samples(found["samples"])), context)
    return content


def _ask(engine: Engine, mode: EvalMode, config: HarnessConfig) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    from ar2diff.evals.harness import HarnessModel

    found: dict[str, Any] = simple_evaluate(
        model=HarnessModel(engine, mode=mode, max_tokens=config.max_tokens),
        tasks=list(config.tasks),
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        apply_chat_template=config.chat,
        task_manager=_load_tasks(config),
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    return found


def _load_tasks(config: HarnessConfig) -> Any:
    """The task files: the user's alone where they are enough, since reading all of lm-eval's takes a minute."""
    known = _index_tasks(config.include, defaults=False)
    if any(not known.match_tasks([name]) for name in config.tasks):
        known = _index_tasks(config.include, defaults=True)
    unknown = [name for name in config.tasks if not known.match_tasks([name])]
    if unknown:
        raise ConfigError("lm-eval knows no such task", given=", ".join(unknown), fix="Name its folder: --include")
    return known


def _index_tasks(include: str | None, *, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include, include_defaults=defaults)


def _describe_task(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """A task's figures, and of its settings what they follow from; paths of this machine stay out."""
    settings = found["configs"][name]
    figures = {key: value for key, value in found["results"][name].items() if "," in key and "stderr" not in key}
    return {
        "version": str(found["versions"].get(name)),
        "settings": {key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None},
        "num_samples": found["n-samples"][name]["effective"],
        "results": {key: value if _is_finite(value) else None for key, value in figures.items()},
    }


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _list_samples(samples: Mapping[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    hidden = tuple(task.name.partition("_")[0] for task in TASKS.values() if task.hash_only)
    for name, rows in samples.items():
        for row in rows:
            # Owners that ask for it get hashes alone: no question, no answer.
            left_out = ("doc", "target", "arguments", "resps", "filtered_resps") if name.startswith(hidden) else ()
            yield {"task": name, **{key: value for key, value in row.items() if key not in left_out}}


def _write(content: Mapping[str, Any], samples: list[dict[str, Any]], context: RunContext) -> None:
    lines = (json.dumps(sample, ensure_ascii=False, default=str) for sample in samples)
    write_text(context.run_dir / SAMPLES_NAME, "".join(line + "\n" for line in lines))
    write_json(context.run_dir / REPORT_NAME, json.loads(json.dumps(content, default=str)))
    files = {"report": REPORT_NAME, "samples": SAMPLES_NAME}
    context.ledger.append(
        HARNESS_EVENT,
        {
            "root": content["about"]["root"],
            "mode": content["about"]["mode"],
            "settings": content["about"]["settings"],
            **{kind: {"path": name, "sha256": sha256_file(context.run_dir / name)} for kind, name in files.items()},
        },
    )
