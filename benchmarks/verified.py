"""Verified decoding by the length of its drafts, with and without copied ones, against the AR mode.

Tokens a second, ids compared. Held-out structured problems; all ways answer a problem before the next one comes, so
that a busy moment hits all of them. `--model` takes a checkpoint folder; without it a tiny random model goes through
the same code. Seconds count from the first token on. The last line of standard output is one JSON document.

    python benchmarks/verified.py --model runs/quickstart/checkpoints/step-000050 --out results/verified.json
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from ar2diff import __version__
from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.request import Request
from ar2diff.models.loading import LoadedModel, load_model
from ar2diff.tasks.structured import build_problems
from ar2diff.testing.models import tiny_diffusion, tiny_model

Report = dict[str, Any]
WAYS: dict[str, Report] = {
    "ar": {"mode": "ar"},
    "draft of 7": {"mode": "verified", "draft_len": 7},
    "draft of 4, adaptive": {"mode": "verified", "draft_len": 4, "adaptive_draft": True},
    "auto": {"mode": "verified", "draft_len": "auto"},
    "4, copies": {"mode": "verified", "draft_len": 4, "adaptive_draft": True, "copy_drafts": True},
    "auto, copies": {"mode": "verified", "draft_len": "auto", "copy_drafts": True},
}
ROWS = (1, 2, 3, 4, 5, 6, 8)


def load(path: Path | None) -> LoadedModel:
    """The checkpoint, or a tiny random model with the block size of the recipe."""
    if path is not None:
        return load_model(path)
    return tiny_model(0, diffusion=tiny_diffusion(block_size=8, trained_block_sizes=(8,)), max_seq_len=1024)


def measure(engine: Engine, num_problems: int, max_tokens: int) -> dict[str, list[Generation]]:
    """Answers by way; each problem by all ways, the first of them in turn."""
    answers: dict[str, list[Generation]] = {name: [] for name in WAYS}
    for idx, problem in enumerate(build_problems(split="eval", count=num_problems)):
        prompt = tuple(engine.loaded.tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True))
        # Known prefixes are shared, so the prompt is taken in before anyone is timed.
        engine.generate(Request(prompt_ids=prompt, max_tokens=1, mode="ar"))
        names = list(WAYS)
        for name in names[idx % len(names) :] + names[: idx % len(names)]:
            answers[name].append(engine.generate(Request(prompt_ids=prompt, max_tokens=max_tokens, **WAYS[name])))
    return answers


def summarise(answers: list[Generation], ar: list[Generation]) -> Report:
    """One way's figures over all its answers."""
    seconds = sum(answer.decode_s for answer in answers)
    cycles = sum(len(answer.passes_per_block) - 1 for answer in answers)
    places = max(len(answer.drafted_by_offset) for answer in answers)
    drafted, accepted = ([0] * places, [0] * places)
    for answer in answers:
        for place, (count, kept) in enumerate(zip(answer.drafted_by_offset, answer.accepted_by_offset, strict=True)):
            drafted[place] += count
            accepted[place] += kept
    return {
        "tokens_per_s": round(sum(len(answer.token_ids) - 1 for answer in answers) / seconds, 2),
        "tokens_per_forward": round(
            sum(len(answer.token_ids) for answer in answers) / sum(answer.num_forward_passes for answer in answers), 3
        ),
        "drafted_a_cycle": round(sum(drafted) / max(1, cycles), 3),
        "copied": sum(answer.num_copied for answer in answers),
        "copied_accepted": sum(answer.num_copied_accepted for answer in answers),
        "drafted_by_offset": drafted,
        "accepted_by_offset": accepted,
        "equal_to_ar": sum(a.token_ids == b.token_ids for a, b in zip(answers, ar, strict=True)),
        "num_answers": len(answers),
        "num_tokens": sum(len(answer.token_ids) for answer in answers),
    }


def list_bars(ways: Report) -> list[Report]:
    """What is asked of these numbers, and whether it holds."""
    rate = {name: figures["tokens_per_s"] for name, figures in ways.items()}
    equal = min(figures["equal_to_ar"] / figures["num_answers"] for figures in ways.values())
    rows = [
        ("auto over ar", rate["auto"] / rate["ar"], 1.5),
        ("auto over a draft of 7", rate["auto"] / rate["draft of 7"], 1.0),
        ("auto over a draft of 4, adaptive", rate["auto"] / rate["draft of 4, adaptive"], 1.0),
        ("4, copies over ar", rate["4, copies"] / rate["ar"], 1.5),
        ("auto, copies over ar", rate["auto, copies"] / rate["ar"], 1.5),
        ("answers are the ar answers, least share", equal, 1.0),
    ]
    return [
        {"name": name, "value": round(value, 3), "bar": bar, "better": "higher", "holds": value >= bar}
        for name, value, bar in rows
    ]


def report(options: argparse.Namespace, folder: Path) -> Report:
    """Everything, measured."""
    torch.set_num_threads(1)
    library = options.library_dir or folder / "library"
    config = EngineConfig(precision="auto", num_threads=options.threads, library_dir=library)
    engine = Engine(load(options.model), clock=SystemClock(), config=config)
    costs = engine.pass_costs()
    answers = measure(engine, options.problems, options.max_tokens)
    ways = {name: summarise(found, answers["ar"]) for name, found in answers.items()}
    return {
        "benchmark": "verified",
        "bars": list_bars(ways),
        "ways": ways,
        "milliseconds_by_rows": {str(rows): round(costs.of(rows) * 1e3, 3) for rows in ROWS},
        "precision": engine.precision_reason,
        "model": {
            "kind": "converted checkpoint" if options.model else "tiny random model",
            "tensor_root": engine.loaded.tensor_root,
        },
        "settings": {"problems": options.problems, "max_tokens": options.max_tokens},
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": options.threads},
        "versions": {"ar2diff": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "load_average": round(os.getloadavg()[0], 2),
        "quick": options.quick,
    }


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few problems and short answers: under a minute")
    parser.add_argument(
        "--model", type=Path, help="a converted checkpoint's folder; a tiny random model unless given"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the compiled code")
    parser.add_argument("--library-dir", type=Path, help="where compiled code is kept; temporary unless given")
    parser.add_argument("--out", type=Path, help="also write the document here")
    options = parser.parse_args()
    options.problems, options.max_tokens = (2, 16) if options.quick else (40, 96)
    with tempfile.TemporaryDirectory() as temporary:
        document = report(options, Path(temporary))
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
