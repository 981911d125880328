"""What each part of the conversion buys: one base, one data folder, one budget, a row of settings.

Every setting starts from the same base, reads the same rows in the same order and computes about the same number of
training positions (all streams counted). A row of `SETTINGS` names what differs from the row it comes after. All of
them answer the same held-out problems, so that two settings are compared problem by problem. A finished setting is
one file in the results folder, written whole; a rerun skips it. The last line of standard output is one JSON
document.

    python benchmarks/ablation.py --base model.gguf --work /tmp/ablation
    python benchmarks/ablation.py --quick
"""

import argparse
import dataclasses
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ablation_table
import torch

from ar2diff import __version__
from ar2diff.clock import SystemClock
from ar2diff.data.config import DataConfig, EvaluationShare, SourceShare
from ar2diff.data.pipeline import prepare
from ar2diff.data.stream import RowStream
from ar2diff.diffusion.noise import NoiseConfig
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.errors import RunError, UnsupportedModelError
from ar2diff.evals.likelihood import build_row, measure_bits, measure_parent_bits
from ar2diff.evals.modes import AR_MODE, EvalMode
from ar2diff.evals.run import build_request
from ar2diff.files import read_json, write_json
from ar2diff.models.adapters import AdapterConfig
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.loading import LoadedModel, load_model, load_tokenizer, save_model
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.table import TASKS, find_task
from ar2diff.testing.models import tiny_model
from ar2diff.train.batch import BatchSettings, build_batch, keyed_noise
from ar2diff.train.config import TrainConfig
from ar2diff.train.metrics import read_metrics
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.optim import OptimConfig
from ar2diff.train.trainer import TrainResult, train
from ar2diff.train.validation import measure_offsets

RESULTS = Path(__file__).parent / "results" / "ablation"
PARENT = "parent"
# Every masked token of a block at once, as the first pass sees it; and a random number of them.
MASKS = {
    "all_masked": NoiseConfig(num_views=1, complementary=False, all_mask_share=1.0),
    "some_masked": NoiseConfig(num_views=1, complementary=False),
}
STEPS_MODE = EvalMode(name="diffusion", mode="diffusion", denoising_steps=8)
VERIFIED_MODE = EvalMode(name="verified", mode="verified", draft_len=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A row of the table: the row it comes after, and what differs from it, by dotted names of `TrainConfig`."""

    after: str | None
    changes: dict[str, object] = field(default_factory=dict)


# The layout of dense peers: a block-causal clean copy, unshifted, one view, the diffusion loss alone.
PLAIN = TrainConfig(
    objective=ObjectiveConfig(
        block_sizes=(8,),
        shift_logits=False,
        clean_attention="block",
        noise=NoiseConfig(num_views=1, complementary=False),
        ar_weight=0.0,
    ),
    optim=OptimConfig(lr=5e-4),
    steps=1,
    micro=1,
    keep_last=1,
)
# In order of importance: a run that is cut short has answered the first questions.
SETTINGS: dict[str, Setting] = {
    "plain": Setting(after=None),
    "causal": Setting(after="plain", changes={"objective.clean_attention": "causal"}),
    "ar_loss": Setting(after="causal", changes={"objective.ar_weight": 1.0}),
    "shift": Setting(after="ar_loss", changes={"objective.shift_logits": True}),
    "views": Setting(after="shift", changes={"objective.noise.num_views": 2, "objective.noise.complementary": True}),
    "all_mask_0.6": Setting(after="views", changes={"objective.noise.all_mask_share": 0.6}),
    "distill": Setting(after="views", changes={"objective.distill_weight": 1.0}),
    "all_mask_1.0": Setting(after="views", changes={"objective.noise.all_mask_share": 1.0}),
    "growth": Setting(after="distill", changes={"objective.block_sizes": (2, 4, 8)}),
    # A low-rank update starts at zero and wants a higher rate; its clean stream is the parent, without a loss.
    "adapter": Setting(
        after="growth", changes={"adapter": AdapterConfig(), "objective.ar_weight": 0.0, "optim.lr": 2e-3}
    ),
    "distill_0.6": Setting(after="all_mask_0.6", changes={"objective.distill_weight": 1.0}),
    "adapter_0.6": Setting(
        after="distill_0.6", changes={"adapter": AdapterConfig(), "objective.ar_weight": 0.0, "optim.lr": 2e-3}
    ),
    "block_4": Setting(after="views", changes={"objective.block_sizes": (4,)}),
    "lr_1e-3": Setting(after="views", changes={"optim.lr": 1e-3}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all settings share.

    Attributes:
        positions: training positions of each setting, all streams counted.
        scored, answered: held-out problems whose reference is scored, and how many of the first are answered.
    """

    base: Path
    data: DataConfig
    data_dir: Path
    row_len: int
    positions: int
    scored: tuple[Problem, ...]
    answered: int
    max_tokens: int
    work: Path
    results: Path
    library_dir: Path


def build_config(name: str, row_len: int) -> TrainConfig:
    """The whole training config of a setting, one step long."""
    chain = []
    row: str | None = name
    while row is not None:
        chain.append(SETTINGS[row].changes)
        row = SETTINGS[row].after
    changes = {path: value for part in reversed(chain) for path, value in part.items()}
    return apply_changes(replace(PLAIN, row_len=row_len), changes)


def apply_changes(config: Any, changes: dict[str, object]) -> Any:
    """`config` with the fields that dotted names give; all of one config's at once, so that each is checked whole."""
    own = {path: value for path, value in changes.items() if "." not in path}
    inner: dict[str, dict[str, object]] = {}
    for path, value in changes.items():
        name, dot, rest = path.partition(".")
        if dot:
            inner.setdefault(name, {})[rest] = value
    for name, part in inner.items():
        own[name] = apply_changes(getattr(config, name), part)
    return replace(config, **own)


def count_steps(config: TrainConfig, plan: Plan) -> int:
    """Optimizer steps until the budget of positions is spent; at least one."""
    objective, stream = config.objective, RowStream(plan.data_dir, row_len=config.row_len, seed=config.seed)
    settings = BatchSettings(
        block_size=objective.block_sizes[-1],
        shift_logits=objective.shift_logits,
        clean_attention=objective.clean_attention,
        mask_token_id=0,
        end_token_id=0,
        nelbo_weighted=False,
        with_causal=False,
    )
    spent, step = 0, 0
    while True:
        draw = keyed_noise(objective.noise, shift_logits=objective.shift_logits, seed=config.seed, step=step)
        spent += len(build_batch([stream.row(step)], settings, draw).token_ids_L)
        if spent > plan.positions:
            return max(step, 1)
        step += 1


def run_setting(name: str, plan: Plan) -> dict[str, object]:
    """Train and measure one setting; its checkpoint is deleted."""
    config = build_config(name, plan.row_len)
    config = replace(config, steps=count_steps(config, plan))
    folder = plan.work / name
    shutil.rmtree(folder, ignore_errors=True)
    result = train(config, plan.base, plan.data_dir, folder, clock=SystemClock())
    steps = read_metrics(folder)
    measured = measure_checkpoint(result, plan)
    shutil.rmtree(folder)
    return {
        "name": name,
        "after": SETTINGS[name].after,
        "changes": json.loads(json.dumps(SETTINGS[name].changes, default=dataclasses.asdict)),
        "config": config.as_json(),
        "budget_positions": plan.positions,
        "steps": result.steps,
        "positions": sum(step["num_tokens"] for step in steps),
        "loss_positions": sum(step["num_loss_tokens"] for step in steps),
        "train_s": round(result.elapsed_s, 1),
        "losses": [[step["diffusion_loss"], step["ar_loss"], step["distill_loss"]] for step in steps],
        **measured,
    }


def measure_checkpoint(result: TrainResult, plan: Plan) -> dict[str, object]:
    """Scores of the references, then answers, problem by problem."""
    started = time.perf_counter()
    loaded = load_model(result.checkpoint)
    diffusion = loaded.diffusion
    assert diffusion is not None
    scored = [score_problem(loaded, diffusion, problem, idx) for idx, problem in enumerate(plan.scored)]
    # The clean stream as an AR model, however it was trained.
    causal = replace(diffusion, shift_logits=True, clean_attention="causal")
    answers = {"ar": answer_all(replace(loaded, diffusion=causal), AR_MODE, plan)}
    answers["diffusion"] = answer_all(loaded, STEPS_MODE, plan)
    if diffusion == causal:
        answers["verified"] = answer_all(loaded, VERIFIED_MODE, plan)
    return {"scored": scored, "answers": answers, "measure_s": round(time.perf_counter() - started, 1)}


def score_problem(loaded: LoadedModel, diffusion: DiffusionConfig, problem: Problem, idx: int) -> dict[str, object]:
    """Masked accuracy by block offset and AR bits of one reference answer."""
    row = build_row(problem, loaded.tokenizer, row_id=idx)
    scores: dict[str, object] = {"id": problem.id, "domain": problem.domain}
    for name, noise in MASKS.items():
        offsets = measure_offsets(
            loaded.decoder,
            [row],
            diffusion,
            noise,
            end_token_id=loaded.tokenizer.eos_token_ids[0],
            block_size=diffusion.block_size,
            seed=0,
        )
        scores[name] = dataclasses.asdict(offsets)
    causal = replace(diffusion, shift_logits=True, clean_attention="causal")
    bits = measure_bits(loaded, causal, [problem], seed=0, num_draws=1)
    return {**scores, "ar_bits": bits.ar_bits, "num_tokens": bits.num_tokens}


def answer_all(loaded: LoadedModel, mode: EvalMode, plan: Plan) -> list[dict[str, object]]:
    """One mode's answers to the first problems, graded."""
    if not plan.answered:
        return []
    config = EngineConfig(precision="auto", num_threads=torch.get_num_threads(), library_dir=plan.library_dir)
    try:
        engine = Engine(loaded, clock=SystemClock(), config=config)
    except UnsupportedModelError as error:
        print(f"not answered: {error.one_line()}", file=sys.stderr)
        return []
    return [answer_one(engine, mode, problem, plan.max_tokens) for problem in plan.scored[: plan.answered]]


def answer_one(engine: Engine, mode: EvalMode, problem: Problem, max_tokens: int) -> dict[str, object]:
    """The answer to one problem, and what it cost."""
    prompt_ids = engine.loaded.tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True)
    request = replace(build_request(mode, tuple(prompt_ids), max_tokens), adaptive_draft=False)
    generation = engine.generate(request)
    ended = generation.finish_reason == "stop"
    return {
        "id": problem.id,
        "correct": ended and TASKS[problem.task].score(problem, generation.text),
        "num_tokens": len(generation.token_ids),
        "num_forward_passes": generation.num_forward_passes,
        "accepted_per_cycle": generation.accepted_per_cycle,
        "text": generation.text,
    }


def measure_parent(plan: Plan) -> dict[str, object]:
    """The base as it is: bits and answers in AR mode."""
    loaded = load_model(plan.base)
    answers = answer_all(loaded, AR_MODE, plan)
    # The mask's id only names what is never predicted: here a row that the base does not have.
    unused = DiffusionConfig(
        block_size=8,
        trained_block_sizes=(8,),
        shift_logits=True,
        mask_token_id=loaded.config.vocab_size,
        clean_attention="causal",
    )
    scored = []
    for problem in plan.scored:
        num_tokens = len(loaded.tokenizer.encode(problem.reference)) + 1
        bits = measure_parent_bits(loaded, unused, [problem])
        scored.append({"id": problem.id, "domain": problem.domain, "ar_bits": bits, "num_tokens": num_tokens})
    return {"name": PARENT, "after": None, "budget_positions": 0, "scored": scored, "answers": {"ar": answers}}


def run_all(plan: Plan, names: list[str]) -> None:
    """Every setting that has no result yet, each written whole when it is done."""
    for name in names:
        path = plan.results / f"{name}.json"
        if path.exists():
            stored = read_json(path, error=RunError)
            if name != PARENT and stored["budget_positions"] != plan.positions:
                raise RunError("the results are of another budget", given=str(path), fix="Use another --results")
            continue
        started = time.perf_counter()
        result = measure_parent(plan) if name == PARENT else run_setting(name, plan)
        write_json(path, {**result, "hardware": describe_hardware(), "versions": describe_versions()})
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def describe_hardware() -> dict[str, object]:
    """The machine."""
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()}


def describe_versions() -> dict[str, str]:
    """What made the numbers."""
    return {"ar2diff": __version__, "torch": version("torch"), "python": platform.python_version()}


def build_problems(structured: int, reasoning: int) -> tuple[Problem, ...]:
    """Held-out problems, those with exact answers first."""
    counts = {"structured": structured, "reasoning": reasoning}
    return tuple(
        problem
        for task, count in counts.items()
        for problem in find_task(task).build_problems(split="eval", count=count, start=0)
    )


def build_data(structured: int, reasoning: int, max_document_len: int) -> DataConfig:
    """The documents, without the held-out problems."""
    return DataConfig(
        sources=(
            SourceShare(source="procedural:structured", count=structured),
            SourceShare(source="procedural:reasoning", count=reasoning),
        ),
        evaluation=(EvaluationShare(task="structured", count=300), EvaluationShare(task="reasoning", count=100)),
        max_document_len=max_document_len,
    )


def build_quick_plan(work: Path) -> Plan:
    """A tiny random model, two steps a setting."""
    save_model(work / "base", tiny_model(0, max_seq_len=2048), None)
    return Plan(
        base=work / "base",
        data=build_data(12, 4, 1000),
        data_dir=work / "data",
        row_len=1024,
        positions=4000,
        scored=build_problems(2, 1),
        answered=1,
        max_tokens=10,
        work=work / "runs",
        results=work / "results",
        library_dir=work / "library",
    )


def build_plan(arguments: argparse.Namespace) -> Plan:
    """The real run."""
    return Plan(
        base=arguments.base,
        data=build_data(1200, 120, 256),
        data_dir=arguments.work / "data",
        row_len=256,
        positions=arguments.positions,
        scored=build_problems(arguments.problems, arguments.problems // 5),
        answered=arguments.answered,
        max_tokens=96,
        work=arguments.work / "runs",
        results=arguments.results,
        library_dir=arguments.work / "library",
    )


def report(plan: Plan, names: list[str]) -> None:
    """Both tables, then one line of JSON."""
    found = [read_json(path, error=RunError) for name in names if (path := plan.results / f"{name}.json").exists()]
    parent = next((result for result in found if result["name"] == PARENT), None)
    settings = [result for result in found if result["name"] != PARENT]
    domain = plan.scored[0].domain
    print(ablation_table.table(settings, domain))
    print(ablation_table.steps_table(settings, domain))
    document = {
        "benchmark": "ablation",
        "bars": ablation_table.bars(settings, domain),
        "parent_ar_bits": None if parent is None else ablation_table.parent_bits(parent, domain),
        "hardware": describe_hardware(),
        "versions": describe_versions(),
    }
    print(json.dumps(document))


def main() -> None:
    """Prepare, run what is missing, and print the table's numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny random model and a few steps")
    parser.add_argument("--base", type=Path, help="the model to convert: a folder or a .gguf file")
    parser.add_argument("--work", type=Path, help="where data and runs lie")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where finished settings are kept")
    parser.add_argument("--positions", type=int, default=40_000, help="training positions a setting")
    parser.add_argument("--problems", type=int, default=24, help="held-out structured problems that are scored")
    parser.add_argument("--answered", type=int, default=12, help="how many of them are answered")
    parser.add_argument("--settings", nargs="*", default=[*SETTINGS, PARENT], help="which, in this order")
    arguments = parser.parse_args()
    if not arguments.quick and None in (arguments.base, arguments.work):
        parser.error("give --base and --work, or --quick")
    with tempfile.TemporaryDirectory() as scratch:
        plan = build_quick_plan(Path(scratch)) if arguments.quick else build_plan(arguments)
        plan.work.mkdir(parents=True, exist_ok=True)
        plan.results.mkdir(parents=True, exist_ok=True)
        prepare(plan.data, load_tokenizer(plan.base), plan.data_dir, ledger=None, progress=None)
        run_all(plan, arguments.settings)
        report(plan, arguments.settings)


if __name__ == "__main__":
    main()
