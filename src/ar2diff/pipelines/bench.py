"""The speed stage: every mode beside the AR parent and other programs, at several batch sizes, in one run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ar2diff.data.config import EvaluationShare
from ar2diff.data.pipeline import fingerprint_tokenizer
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.loading import LoadPrecision, check_precision, load_engine
from ar2diff.engine.request import check_request
from ar2diff.errors import ConfigError, ModelError
from ar2diff.evals.modes import EvalMode, build_modes
from ar2diff.evals.peers import AbsentError, LlamaRacer, TransformersRacer, closing
from ar2diff.evals.run import build_request
from ar2diff.evals.speed import EngineRacer, Prompts, Racer, SpeedReport, Turn, race
from ar2diff.files import write_json
from ar2diff.hashing import sha256_file
from ar2diff.models.loading import load_tokenizer
from ar2diff.pipelines.evaluation import describe_engine, describe_machine, torch_threads
from ar2diff.pipelines.recipe import MAX_BATCH
from ar2diff.pipelines.stages import RunContext, build_problems, fetch_problems
from ar2diff.tasks.table import find_task
from ar2diff.train.checkpoint import OPTIMIZER_NAME, is_checkpoint, verify_checkpoint

BENCH_EVENT = "bench"
SPEED_NAME = "speed.json"
# KV places of a request beyond its prompt and answer: blocks and lanes that a pass stages.
STAGED_PLACES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What is timed.

    Attributes:
        problems: whose prompts are answered.
        modes, steps, thresholds: as of an evaluation.
        batch_sizes: requests at a time.
        max_tokens: of an answer.
        repeats: turns of each contestant at each batch size.
        precision: what our engines compute in.
    """

    problems: tuple[EvaluationShare, ...] = (EvaluationShare(task="structured", count=96),)
    modes: str = "parent,ar,verified,verified+copies,diffusion"
    steps: tuple[int, ...] = (1, 2, 4, 8)
    thresholds: tuple[float, ...] = (0.9,)
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    max_tokens: int = 128
    repeats: int = 3
    precision: LoadPrecision = "auto"

    def __post_init__(self) -> None:
        check_precision(self.precision)
        for share in self.problems:
            find_task(share.task)
        build_modes(self.modes, self.steps, self.thresholds)
        for name in ("max_tokens", "repeats"):
            if not 1 <= getattr(self, name) < 2**20:
                raise ConfigError(f"{name} must be at least 1 and below a million", given=getattr(self, name))
        sizes = self.batch_sizes
        if not sizes or not all(1 <= size <= MAX_BATCH for size in sizes) or len(set(sizes)) < len(sizes):
            raise ConfigError(f"batch sizes are different numbers from 1 to {MAX_BATCH}", given=repr(sizes))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Other programs beside ours.

    Attributes:
        llama: folder in which node-llama-cpp is installed.
        gguf: what llama.cpp runs.
    """

    llama: Path | None = None
    gguf: Path | None = None


def bench_run(
    checkpoint: Path, base: Path | None, config: BenchConfig, peers: Peers, context: RunContext
) -> SpeedReport:
    """Time a checkpoint, its base and other programs on the same prompts; writes speed.json into the run.

    Raises:
        CheckpointError: the checkpoint's files were changed.
        ConfigError: the parent's mode without a base, or fewer problems than the largest batch.
        RequestError: the model cannot decode in a mode that is asked for.
    """
    context.view.stage("Measuring speed")
    modes = build_modes(config.modes, config.steps, config.thresholds)
    if base is None and any(mode.parent for mode in modes):
        raise ConfigError("the parent's speed needs the parent", fix="Name it with --base, or leave the mode out")
    if is_checkpoint(checkpoint):
        verify_checkpoint(checkpoint, skip=(OPTIMIZER_NAME,))
    prompts = _encode_prompts(checkpoint, config, context)
    engines = {"converted": _load_engine(checkpoint, prompts, config, context)}
    if base is not None and any(mode.parent for mode in modes):
        engines["parent"] = _load_engine(base, prompts, config, context)
    _check_engines(engines, modes, prompts)
    racers: list[Racer] = [_build_racer(engines, mode, context) for mode in modes]
    others, absent, notes = _find_peers(checkpoint, engines["converted"], prompts, config, peers, context)
    total = (len(racers) + len(others)) * len(config.batch_sizes) * config.repeats
    turns: list[Turn] = []
    with closing(others):
        for turn in race(
            racers + others, prompts, config.batch_sizes, repeats=config.repeats, max_tokens=config.max_tokens
        ):
            turns.append(turn)
            context.view.evaluation(len(turns), total, turn.name)
    about = {
        "roots": {name: engine.loaded.tensor_root for name, engine in engines.items()},
        "settings": config.as_json(),
        "engine": describe_engine(engines["converted"]),
        "peers": notes,
        "machine": describe_machine(context.device),
    }
    report = SpeedReport(turns=tuple(turns), absent=absent, about=about)
    _write(report, context)
    return report


def _encode_prompts(checkpoint: Path, config: BenchConfig, context: RunContext) -> list[list[int]]:
    problems = build_problems(config.problems, fetch_problems(config.problems, context))
    tokenizer = load_tokenizer(checkpoint)
    return [tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True) for problem in problems]


def _count_places(prompts: Prompts, config: BenchConfig) -> int:
    return max(map(len, prompts)) + config.max_tokens + STAGED_PLACES


def _load_engine(path: Path, prompts: Prompts, config: BenchConfig, context: RunContext) -> Engine:
    largest = max(config.batch_sizes)
    return load_engine(
        path,
        config.precision,
        clock=context.clock,
        library_dir=context.library_dir,
        device=context.device,
        num_threads=torch.get_num_threads(),
        config=EngineConfig(max_running=largest, kv_tokens=largest * _count_places(prompts, config)),
    )


def _check_engines(engines: dict[str, Engine], modes: Sequence[EvalMode], prompts: Prompts) -> None:
    if len({fingerprint_tokenizer(engine.loaded.tokenizer) for engine in engines.values()}) > 1:
        raise ModelError("the base has another tokenizer than the checkpoint", fix="Name the base it came from")
    for mode in modes:
        loaded = engines["parent" if mode.parent else "converted"].loaded
        for ids in prompts:
            check_request(build_request(mode, tuple(ids), max_tokens=1), loaded.config, loaded.diffusion)


def _build_racer(engines: dict[str, Engine], mode: EvalMode, context: RunContext) -> EngineRacer:
    engine = engines["parent" if mode.parent else "converted"]
    threads = 1 if engine.runner.rows_are_independent else torch.get_num_threads()
    return EngineRacer(engine, mode, clock=context.clock, hold_threads=partial(torch_threads, threads))


def _find_peers(
    checkpoint: Path, engine: Engine, prompts: Prompts, config: BenchConfig, peers: Peers, context: RunContext
) -> tuple[list[Racer], dict[str, str], dict[str, str]]:
    """Those that can take part, why the others cannot, and what each computes in."""
    racers, absent, notes = list[Racer](), dict[str, str](), dict[str, str]()
    dtype = torch.float32 if context.device == "cpu" else torch.bfloat16
    ends = engine.loaded.tokenizer.eos_token_ids
    try:
        racers.append(
            TransformersRacer(checkpoint, end_ids=ends, clock=context.clock, dtype=dtype, device=context.device)
        )
        notes[TransformersRacer.name] = f"the checkpoint, {str(dtype).removeprefix('torch.')}"
    except AbsentError as error:
        absent[TransformersRacer.name] = error.one_line()
    try:
        llama = LlamaRacer(
            peers.llama,
            peers.gguf,
            threads=torch.get_num_threads(),
            num_sequences=max(config.batch_sizes),
            num_places=_count_places(prompts, config),
        )
        racers.append(llama)
        notes[LlamaRacer.name] = f"{peers.gguf.name if peers.gguf else ''}, {llama.about}"
    except AbsentError as error:
        absent[LlamaRacer.name] = error.one_line()
    return racers, absent, notes


def _write(report: SpeedReport, context: RunContext) -> None:
    path = context.run_dir / SPEED_NAME
    write_json(path, report.as_json())
    named = {name: report.about[name] for name in ("roots", "settings", "engine")}
    context.ledger.append(BENCH_EVENT, {**named, "report": {"path": SPEED_NAME, "sha256": sha256_file(path)}})
