"""Acceptance of drafts over the checkpoints of one training, and what it promises with more training.

Every checkpoint answers the same held-out problems in verified mode with drafts of 7. For each domain and place after
the anchor: the chance that a draft is accepted once all before it were. Over at least three checkpoints a power law
is fitted, 1 - chance = scale * positions**-exponent, where positions are those that the training has seen. From
chances and what passes cost here follows the best draft length with its promise, tokens a second over plain steps;
from the laws, at how many positions it would reach 1.5. Without `--checkpoints` two tiny random adapters go through
the same code. The last line of standard output is one JSON document.

    python benchmarks/acceptance.py --checkpoints RUN/checkpoints/step-* --metrics RUN/metrics.jsonl --out a.json
"""

import argparse
import json
import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ar2diff import __version__
from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.draft_plan import PassCosts, choose_draft_len
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.request import Request
from ar2diff.models.adapters import AdapterConfig, GatedAdapter
from ar2diff.models.loading import load_model, save_model
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.table import TASKS
from ar2diff.testing.models import tiny_diffusion, tiny_model
from ar2diff.train.checkpoint import step_of

Report = dict[str, Any]
DOMAINS = ("structured", "reasoning")
DRAFT_LEN = 7
ROWS = (1, 2, 3, 4, 5, 6, 7, 8)
BAR = 1.5
MIN_POINTS = 3
MAX_TIMES = 1000.0
# Of the positions tried, two neighbours differ by a hundredth.
GRID = 1.01
TOO_FAR = f"not within {MAX_TIMES:g} times"


@dataclass(frozen=True, slots=True)
class Law:
    """1 - chance = scale * positions**-exponent."""

    scale: float
    exponent: float

    def chance(self, positions: float) -> float:
        """The chance after so many positions; 0 where the law gives less."""
        return max(0.0, 1.0 - self.scale * positions**-self.exponent)


@dataclass(slots=True)
class Counts:
    """Of one domain, by place after the anchor: how often a draft was reached, and accepted."""

    reached: list[int]
    accepted: list[int]

    def add(self, answer: Generation) -> None:
        """Count an answer's cycles."""
        for place, (tried, kept) in enumerate(zip(answer.reached_by_offset, answer.accepted_by_offset, strict=True)):
            self.reached[place] += tried
            self.accepted[place] += kept

    @property
    def chances(self) -> list[float | None]:
        """Accepted of reached; None where a place was never reached."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [kept / tried if tried else None for kept, tried in pairs]


@dataclass(frozen=True, slots=True)
class Measured:
    """One checkpoint: what it had seen, its counts by domain, its answers, and the engine's speed."""

    name: str
    positions: int
    counts: dict[str, Counts]
    answers: list[tuple[int, ...]]
    ar_answers: list[tuple[int, ...]]
    costs: PassCosts
    precision: str
    is_gated: bool


def fit_law(positions: Sequence[float], chances: Sequence[float | None]) -> Law | None:
    """Least squares in logarithms; None with fewer than three points at different positions.

    Args:
        chances: None and 1 are no points: there is no logarithm.
    """
    points = [(n, 1.0 - chance) for n, chance in zip(positions, chances, strict=True) if chance not in (None, 1.0)]
    if len({n for n, _ in points}) < MIN_POINTS:
        return None
    x, y = np.log(np.array(points)).T
    slope, intercept = np.polyfit(x, y, 1)
    return Law(scale=math.exp(float(intercept)), exponent=-float(slope))


def promise(costs: PassCosts, chances: Sequence[float]) -> tuple[int, float]:
    """The best draft length and its tokens a second over plain steps: 0 and 1 where no draft pays."""
    length = choose_draft_len(costs, chances, 1)
    if not length:
        return 0, 1.0
    tokens = 1.0 + float(np.cumprod(chances[:length]).sum())
    return length, tokens * costs.of(1) / (2 * costs.of(1 + length))


def find_positions(
    costs: PassCosts, laws: Sequence[Law | None], last: Sequence[float | None], now: float
) -> float | str:
    """The positions from `now` on at which the promise first reaches the bar, to a hundredth.

    Args:
        last: the chances at `now`, which a place without a law keeps.
    """
    if not any(laws):
        return "no fit"
    times = 1.0
    while times <= MAX_TIMES:
        pairs = zip(laws, last, strict=True)
        chances = [law.chance(now * times) if law else chance or 0.0 for law, chance in pairs]
        if promise(costs, chances)[1] >= BAR:
            return float(f"{now * times:.3g}")
        times *= GRID
    return TOO_FAR


def count_positions(metrics: Path, step: int) -> int:
    """Positions that a training saw up to a step.

    Raises:
        SystemExit: the metrics lack one of these steps.
    """
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    seen = {line["step"]: line["num_tokens"] for line in lines}
    missing = next((number for number in range(1, step + 1) if number not in seen), None)
    if missing is not None:
        raise SystemExit(f"error: {metrics} has no step {missing}. Name the metrics of the checkpoints' own run")
    return sum(seen[number] for number in range(1, step + 1))


def encode(engine: Engine, problem: Problem) -> tuple[int, ...]:
    """A problem's prompt."""
    return tuple(engine.loaded.tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True))


def measure(
    folder: Path,
    positions: int,
    problems: dict[str, list[Problem]],
    options: argparse.Namespace,
    known: Sequence[Measured],
) -> Measured:
    """All problems answered by one checkpoint.

    Under a mask-gated adapter the AR path is the base's, so the AR answers of the first checkpoint are everyone's.
    """
    config = EngineConfig(precision="auto", num_threads=options.threads, library_dir=options.library_dir)
    engine = Engine(load_model(folder), clock=SystemClock(), config=config)
    costs, is_gated = engine.pass_costs(), bool(engine.runner.has_gate)
    places = min(DRAFT_LEN, engine.loaded.diffusion.block_size - 1)
    counts = {domain: Counts([0] * places, [0] * places) for domain in DOMAINS}
    ar_answers = list(known[0].ar_answers) if is_gated and known and known[0].is_gated else []
    needs_ar, answers = not ar_answers, []
    for domain, held_out in problems.items():
        for problem in held_out:
            asked = {"prompt_ids": encode(engine, problem), "max_tokens": options.max_tokens}
            if needs_ar:
                ar_answers.append(engine.generate(Request(mode="ar", **asked)).token_ids)
            answer = engine.generate(Request(mode="verified", draft_len=places, **asked))
            counts[domain].add(answer)
            answers.append(answer.token_ids)
    # Rounding by the number of rows may part them outside int8; then what was drafted had another text before it.
    if is_gated and engine.runner.rows_are_independent and answers != ar_answers:
        raise SystemExit(f"error: {folder} answers otherwise than the AR path. The checkpoints must share their base")
    return Measured(
        name=folder.name,
        positions=positions,
        counts=counts,
        answers=answers,
        ar_answers=ar_answers,
        costs=costs,
        precision=engine.precision_reason,
        is_gated=is_gated,
    )


def describe_domain(measured: Sequence[Measured], domain: str, costs: PassCosts) -> Report:
    """Chances by checkpoint, their laws, and what follows."""
    positions = [one.positions for one in measured]
    chances = [one.counts[domain].chances for one in measured]
    laws = [fit_law(positions, column) for column in zip(*chances, strict=True)]
    length, now = promise(costs, [chance or 0.0 for chance in chances[-1]])
    return {
        "checkpoints": [
            {
                "name": one.name,
                "positions": one.positions,
                "chances": [None if chance is None else round(chance, 4) for chance in row],
                "reached": one.counts[domain].reached,
            }
            for one, row in zip(measured, chances, strict=True)
        ],
        "laws": [None if law is None else {"scale": law.scale, "exponent": law.exponent} for law in laws],
        "now": {"draft_len": length, "speedup": round(now, 3)},
        f"positions_at_{BAR:g}x": find_positions(costs, laws, chances[-1], positions[-1]),
    }


def list_bars(measured: Sequence[Measured], domains: Report) -> list[Report]:
    """What is asked of these numbers, and whether it holds."""
    pairs = [pair for one in measured for pair in zip(one.answers, one.ar_answers, strict=True)]
    equal = sum(answer == ar for answer, ar in pairs) / len(pairs)
    best = max(found["now"]["speedup"] for found in domains.values())
    rows = [("answers that are the ar answers", equal, 1.0), ("best promised speed-up now", best, BAR)]
    return [
        {"name": name, "value": round(value, 4), "bar": bar, "better": "higher", "holds": value >= bar}
        for name, value, bar in rows
    ]


def make_tiny(folder: Path) -> list[tuple[Path, int]]:
    """Two checkpoints of a random base: adapters of different seeds."""
    made = []
    for step in (1, 2):
        diffusion = tiny_diffusion(block_size=8, trained_block_sizes=(8,))
        loaded = tiny_model(0, diffusion=diffusion, max_seq_len=1024)
        config = AdapterConfig(rank=2, alpha=4.0)
        adapter = GatedAdapter(loaded.decoder, config, mask_token_id=diffusion.mask_token_id, seed=step)
        with torch.no_grad():
            for parameter in adapter.parameters().values():
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(step))
        save_model(folder / f"step-{step:06d}", loaded, diffusion)
        made.append((folder / f"step-{step:06d}", 1000 * step))
    return made


def list_checkpoints(options: argparse.Namespace, folder: Path) -> list[tuple[Path, int]]:
    """Each checkpoint and the positions that it has seen, fewest first."""
    if not options.checkpoints:
        return make_tiny(folder)
    before = options.positions_before
    found = [(path, before + count_positions(options.metrics, step_of(path))) for path in options.checkpoints]
    start = [(options.start, before)] if options.start else []
    return sorted([*start, *found], key=lambda pair: pair[1])


def report(options: argparse.Namespace, folder: Path) -> Report:
    """Everything, measured."""
    torch.set_num_threads(1)
    options.library_dir = options.library_dir or folder / "library"
    problems = {name: TASKS[name].build_problems(split="eval", count=options.problems) for name in DOMAINS}
    measured: list[Measured] = []
    for path, positions in list_checkpoints(options, folder):
        measured.append(measure(path, positions, problems, options, measured))
        print(f"{path.name}: {positions} positions, measured", file=sys.stderr, flush=True)
    costs = measured[-1].costs
    domains = {domain: describe_domain(measured, domain, costs) for domain in DOMAINS}
    return {
        "benchmark": "acceptance",
        "bars": list_bars(measured, domains),
        "domains": domains,
        "milliseconds_by_rows": {str(rows): round(costs.of(rows) * 1e3, 3) for rows in ROWS},
        "precision": measured[-1].precision,
        "model": {
            "kind": "checkpoints of one training" if options.checkpoints else "tiny random adapters",
            "mask_gated": all(one.is_gated for one in measured),
        },
        "settings": {
            "problems_a_domain": options.problems,
            "max_tokens": options.max_tokens,
            "draft_len": DRAFT_LEN,
            "positions_before": options.positions_before,
        },
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": options.threads},
        "versions": {"ar2diff": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "load_average": round(os.getloadavg()[0], 2),
        "quick": options.quick,
    }


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few problems and short answers: under a minute")
    parser.add_argument("--checkpoints", type=Path, nargs="+", default=[], help="folders step-NNNNNN of one training")
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of that training")
    parser.add_argument("--start", type=Path, help="a checkpoint that the training began at, measured too")
    parser.add_argument("--positions-before", type=int, default=0, help="positions that the start had seen")
    parser.add_argument("--problems", type=int, default=20, help="of each domain")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the compiled code")
    parser.add_argument("--library-dir", type=Path, help="where compiled code is kept; temporary unless given")
    parser.add_argument("--out", type=Path, help="also write the document here")
    options = parser.parse_args()
    if options.checkpoints and options.metrics is None:
        parser.error("--checkpoints needs --metrics")
    if options.start and not options.positions_before:
        parser.error("--start needs --positions-before")
    if not all(re.fullmatch(r"step-\d+", path.resolve().name) for path in options.checkpoints):
        parser.error("--checkpoints are folders named step-NNNNNN")
    options.max_tokens = 96
    if options.quick:
        options.problems, options.max_tokens = 2, 16
    with tempfile.TemporaryDirectory() as temporary:
        document = report(options, Path(temporary))
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
