"""The evaluation stage: parent and child, every mode, one table, samples kept and hashed into the ledger."""

import gc
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from ar2diff import __version__
from ar2diff.data.pipeline import fingerprint_tokenizer
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.loading import load_engine
from ar2diff.engine.request import check_request
from ar2diff.errors import CheckpointError, ConfigError, ModelError
from ar2diff.evals.likelihood import measure_bits, measure_parent_bits
from ar2diff.evals.modes import EvalMode, build_modes
from ar2diff.evals.report import EvalReport
from ar2diff.evals.run import Contestants, answer_problems, build_request
from ar2diff.evals.scores import Answer
from ar2diff.files import write_json, write_text
from ar2diff.hashing import sha256_file
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.loading import load_model
from ar2diff.pipelines.answer_log import AnswerLog
from ar2diff.pipelines.recipe import EvaluationConfig
from ar2diff.pipelines.served_answers import SERVER_LOG_NAME, ServedEngine
from ar2diff.pipelines.stages import RunContext, build_problems, fetch_problems
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.tasks.problem import Problem
from ar2diff.train.checkpoint import OPTIMIZER_NAME, is_checkpoint, verify_checkpoint

EVALUATE_EVENT = "evaluate"
# Enough for every kind of pass to have run once before any is timed.
WARM_UP_TOKENS = 8
REPORT_NAME, SAMPLES_NAME = "eval.json", "eval_samples.jsonl"


def evaluate_run(
    base: Path,
    checkpoint: Path,
    config: EvaluationConfig,
    context: RunContext,
    *,
    served: ServedEngine | None = None,
) -> EvalReport:
    """Compare a checkpoint with its base; writes eval.json and eval_samples.jsonl into the run.

    The time budget covers all of it but the loading of weights, and at least one problem is asked in every mode.

    Args:
        served: gives the checkpoint's answers in place of an engine in this process.

    Raises:
        CheckpointError: `checkpoint` is not a converted model, or its files were changed.
        ConfigError: two different problems have the same id.
        ModelError: `base` has another tokenizer than its child.
        RequestError: the model cannot decode in a mode that is asked for.
        RunError: the server does not answer, or its log lacks an answer.
    """
    context.view.stage("Evaluating")
    problems = _list_once(build_problems(config.problems, fetch_problems(config.problems, context)))
    modes = build_modes(config.modes, config.steps, config.thresholds)
    if is_checkpoint(checkpoint):
        verify_checkpoint(checkpoint, skip=(OPTIMIZER_NAME,))
    with_reference = [problem for problem in problems if problem.reference]
    likelihood = _measure_likelihood(base, checkpoint, with_reference[: config.bits_problems], context)
    parent = _load_engine(base, config, context)
    child = served or _load_engine(checkpoint, config, context)
    contestants = Contestants(parent=parent, converted=child, tokenizer=child.loaded.tokenizer)
    _check_contestants(contestants, problems[0], modes)
    about: dict[str, object] = {
        "roots": likelihood.roots,
        "diffusion": likelihood.diffusion.as_json(),
        "settings": config.as_json(),
        "engine": child.provenance if isinstance(child, ServedEngine) else describe_engine(child),
        "machine": describe_machine(context.device),
    }
    threads = 1 if parent.runner.rows_are_independent else torch.get_num_threads()
    with AnswerLog(context.run_dir, about) as log:
        with torch_threads(threads):
            answers = _ask(contestants, problems, modes, config, context, log, spent_s=likelihood.seconds)
        report = _build_report(answers, modes, likelihood, about)
        _write_report(report, context, served)
        log.finish()
    return report


def _list_once(problems: Sequence[Problem]) -> list[Problem]:
    """The problems, each once: named twice, one would be counted twice.

    Raises:
        ConfigError: two different problems have the same id, such as the same row of two files.
    """
    known: dict[str, Problem] = {}
    for problem in problems:
        if known.setdefault(problem.id, problem) != problem:
            raise ConfigError(
                "two different problems have the same id",
                given=problem.id,
                fix="Evaluate their files into different run directories",
            )
    return list(known.values())


def _build_report(
    answers: Sequence[Answer], modes: Sequence[EvalMode], likelihood: "_Likelihood", about: dict[str, object]
) -> EvalReport:
    bits = {mode.name: likelihood.bits[kind] for mode in modes if (kind := _bits_kind(mode)) in likelihood.bits}
    return EvalReport(answers=tuple(answers), bits_per_token=bits, about=about)


def _load_engine(path: Path, config: EvaluationConfig, context: RunContext) -> Engine:
    return load_engine(
        path,
        config.precision,
        clock=context.clock,
        library_dir=context.library_dir,
        device=context.device,
        num_threads=torch.get_num_threads(),
        config=EngineConfig(max_running=max(config.batch_size, EngineConfig().max_running)),
    )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Hold torch to so many threads: a compiled pass has its own, and torch's would spin on the same cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_engine(engine: Engine) -> dict[str, object]:
    """What an engine's speed and rounding depend on."""
    config = engine.config
    return {
        "precision": engine.precision_reason,
        "prefill_chunk": config.prefill_chunk,
        "row_multiple": config.row_multiple,
        "num_threads": config.num_threads,
    }


def check_model_paths(*paths: Path) -> None:
    """Refuse, before a run directory is made, what cannot be a model.

    Raises:
        ModelError: neither a folder with a config.json nor a .gguf file.
    """
    for path in paths:
        if not ((path / "config.json").is_file() or (path.is_file() and path.suffix == ".gguf")):
            raise ModelError("no model folder or .gguf file", given=str(path), fix="Check the path")


def find_report(run_dir: Path, config: EvaluationConfig, checkpoint_root: str) -> EvalReport | None:
    """The run's newest report, if it is of these settings and this checkpoint and its files are as logged."""
    events = find_events(run_dir / LEDGER_NAME, EVALUATE_EVENT)
    data = events[-1].data if events else None
    if data is None or data["settings"] != config.as_json() or data["roots"]["converted"] != checkpoint_root:
        return None
    for logged in (data["report"], data["samples"]):
        path = run_dir / logged["path"]
        if not path.is_file() or sha256_file(path) != logged["sha256"]:
            return None
    content = json.loads((run_dir / REPORT_NAME).read_text(encoding="utf-8"))
    lines = (run_dir / SAMPLES_NAME).read_text(encoding="utf-8").split("\n")
    return EvalReport.from_json(content, (json.loads(line) for line in lines if line))


def describe_machine(device: str) -> dict[str, object]:
    """What speed figures depend on: device, processor, threads, versions."""
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Likelihood:
    """Bits by kind (parent, ar, diffusion), tensor roots, the child's settings, and the time that measuring took."""

    bits: dict[str, float]
    roots: dict[str, str]
    diffusion: DiffusionConfig
    seconds: float


def _measure_likelihood(
    base: Path, checkpoint: Path, problems: Sequence[Problem], context: RunContext
) -> _Likelihood:
    """Bits in fp32, whatever the engines use; one model in memory at a time."""
    child = load_model(checkpoint, device=context.device)
    diffusion = child.diffusion
    if diffusion is None:
        raise CheckpointError("not a converted model", given=str(checkpoint), fix="Name a checkpoint of a run")
    bits: dict[str, float] = {}
    roots = {"converted": child.tensor_root}
    started_s = context.clock.seconds()
    if problems:
        measured = measure_bits(child, diffusion, problems, seed=0)
        bits |= {"ar": measured.ar_bits, "diffusion": measured.bound_bits}
    seconds = context.clock.seconds() - started_s
    del child
    gc.collect()
    parent = load_model(base, device=context.device)
    roots["parent"] = parent.tensor_root
    started_s = context.clock.seconds()
    if problems:
        bits["parent"] = measure_parent_bits(parent, diffusion, problems)
    seconds += context.clock.seconds() - started_s
    return _Likelihood(bits=bits, roots=roots, diffusion=diffusion, seconds=seconds)


def _bits_kind(mode: EvalMode) -> str:
    if mode.parent:
        return "parent"
    return "diffusion" if mode.mode == "diffusion" else "ar"


def _check_contestants(contestants: Contestants, problem: Problem, modes: Sequence[EvalMode]) -> None:
    parent, child = contestants.parent.loaded, contestants.converted.loaded
    if fingerprint_tokenizer(parent.tokenizer) != fingerprint_tokenizer(child.tokenizer):
        raise ModelError("the base has another tokenizer than the checkpoint", fix="Name the base it came from")
    ids = tuple(child.tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True))
    for mode in modes:
        model = parent if mode.parent else child
        check_request(build_request(mode, ids, max_tokens=1), model.decoder.config, model.diffusion)


def _ask(
    contestants: Contestants,
    problems: Sequence[Problem],
    modes: Sequence[EvalMode],
    config: EvaluationConfig,
    context: RunContext,
    log: AnswerLog,
    *,
    spent_s: float,
) -> list[Answer]:
    """All answers, or those of the first problems that fit into the time budget; at least one batch is asked."""
    clock, answers = context.clock, list[Answer]()
    warming_s = clock.seconds()
    for mode in modes:
        answer_problems(
            contestants, problems[:1], mode, max_tokens=min(WARM_UP_TOKENS, config.max_tokens), clock=clock
        )
    started_s = clock.seconds()
    left_s = None if config.minutes is None else config.minutes * 60 - spent_s - (started_s - warming_s)
    batches = [problems[at : at + config.batch_size] for at in range(0, len(problems), config.batch_size)]
    for idx, batch in enumerate(batches):
        if left_s is not None and idx and (clock.seconds() - started_s) * (idx + 1) / idx > left_s:
            break
        # Every mode takes every place in turn, so that a machine that slows down or speeds up favours none.
        first = idx % len(modes)
        for mode in (*modes[first:], *modes[:first]):
            known = [log.known.get((mode.name, problem.id)) for problem in batch]
            asked = [problem for problem, answer in zip(batch, known, strict=True) if answer is None]
            if asked:
                found = answer_problems(contestants, asked, mode, max_tokens=config.max_tokens, clock=clock)
                if isinstance(contestants.converted, ServedEngine) and not mode.parent:
                    ids = contestants.converted.last_request_ids
                    found = [replace(answer, request_id=id_) for answer, id_ in zip(found, ids, strict=True)]
                for answer in found:
                    log.add(answer)
            answers += [log.known[mode.name, problem.id] for problem in batch]
            context.view.evaluation(len(answers), len(problems) * len(modes), mode.name)
    order = {mode.name: place for place, mode in enumerate(modes)}
    return sorted(answers, key=lambda answer: order[answer.mode])


def _write_report(report: EvalReport, context: RunContext, served: ServedEngine | None) -> None:
    asked = {answer.request_id for answer in report.answers if answer.request_id is not None}
    server_log = None if served is None else served.keep_log(context.run_dir, asked)
    if server_log is None:
        (context.run_dir / SERVER_LOG_NAME).unlink(missing_ok=True)
    samples = context.run_dir / SAMPLES_NAME
    write_text(samples, "".join(json.dumps(a.as_json(), ensure_ascii=False) + "\n" for a in report.answers))
    write_json(context.run_dir / REPORT_NAME, report.as_json())
    named = {name: report.about[name] for name in ("roots", "settings", "engine")}
    context.ledger.append(
        EVALUATE_EVENT,
        {
            **named,
            "report": {"path": REPORT_NAME, "sha256": sha256_file(context.run_dir / REPORT_NAME)},
            "samples": {"path": SAMPLES_NAME, "sha256": sha256_file(samples)},
            "server": None if served is None else served.provenance,
            "server_log": None
            if server_log is None
            else {"path": SERVER_LOG_NAME, "sha256": sha256_file(server_log)},
        },
    )
