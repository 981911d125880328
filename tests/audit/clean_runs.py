"""Honest runs of many seeds and settings, each audited with --deep: `python tests/audit/clean_runs.py COUNT [FILE]`.

Prints a line a run; the last line is one JSON document. Ends with 1 where an honest run does not pass.
"""

import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from made_run import MadeRun, make_run, train_on_adapter, train_with_two_ranks

from ar2diff import __version__
from ar2diff.audit.report import render_text
from ar2diff.audit.result import AuditReport
from ar2diff.audit.verify import audit_run
from ar2diff.data.config import SourceShare
from ar2diff.diffusion.noise import NoiseConfig
from ar2diff.export.export import ExportOptions, export_model
from ar2diff.models.adapters import AdapterConfig
from ar2diff.pipelines.recipe import OnPolicyConfig, Recipe
from ar2diff.train.objective import ObjectiveConfig

Change = Callable[[Recipe], Recipe]
PROCEDURAL, PARENT = "procedural:structured", "parent:procedural:structured"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a run differs from the run of the tests.

    Attributes:
        change: of the recipe.
        stopped: stop it after three steps and go on.
        make: what makes it.
        after: what its owner does with it afterwards; returns the folder to audit.
        server: as of `audit_run`.
        replay: steps to train again.
    """

    change: Change = lambda recipe: recipe
    stopped: bool = False
    make: Callable[..., MadeRun] = make_run
    after: Callable[[Path], Path] = lambda run: run
    server: str = "none"
    replay: int | None = 2


def train(**changes: Any) -> Change:
    """Other settings of the training."""
    return lambda recipe: replace(recipe, train=replace(recipe.train, **changes))


def objective(**changes: Any) -> Change:
    """Another objective."""
    return lambda recipe: train(objective=replace(recipe.train.objective, **changes))(recipe)


def evaluate(**changes: Any) -> Change:
    """Another evaluation."""
    return lambda recipe: replace(recipe, evaluate=replace(recipe.evaluate, **changes))


def data(*chosen: int | SourceShare) -> Change:
    """Sources out of the recipe's, by place, and others."""

    def change(recipe: Recipe) -> Recipe:
        sources = tuple(recipe.data.sources[c] if isinstance(c, int) else c for c in chosen)
        return replace(recipe, data=replace(recipe.data, sources=sources))

    return change


def both(*changes: Change) -> Change:
    """One change after the other."""

    def change(recipe: Recipe) -> Recipe:
        for part in changes:
            recipe = part(recipe)
        return recipe

    return change


def export(run: Path) -> Path:
    """The release that a user makes for another engine, in the run."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    export_model(newest, "hf", run / "release", ExportOptions())
    return run


def carry(run: Path) -> Path:
    """A copy on another disk, as plain files."""
    return Path(shutil.copytree(run, run.parent / "carried" / "away"))


NOT_SHIFTED = ObjectiveConfig(block_sizes=(4,), shift_logits=False)
FROZEN = objective(ar_weight=0.0, distill_weight=1.0)
ON_ADAPTER = both(
    objective(ar_weight=0.0, block_sizes=(4,), anchor="last"),
    train(adapter=AdapterConfig(rank=2, alpha=4.0), average_last=0),
    data(0, 2, SourceShare(source=PARENT, count=4, start=50, temperature=2.0, max_tokens=120)),
)
VARIANTS: dict[str, Variant] = {
    "as it is, stopped and resumed": Variant(stopped=True, server="auto"),
    "one block size": Variant(change=objective(block_sizes=(4,))),
    # Without shifted logits there is no autoregressive path to measure.
    "logits not shifted": Variant(
        change=both(train(objective=NOT_SHIFTED), evaluate(modes="parent,diffusion")), stopped=True, server="auto"
    ),
    "long blocks": Variant(change=objective(block_sizes=(8, 16), block_schedule="mix")),
    "rows in two parts": Variant(change=train(micro=2, accum=2), stopped=True),
    "a time budget": Variant(change=train(steps=None, minutes=0.02, save_every=1, average_last=0)),
    "never saved before the end": Variant(change=train(save_every=None, average_last=0)),
    "an adapter": Variant(
        change=both(FROZEN, train(adapter=AdapterConfig(rank=2, alpha=4.0), average_last=0)), server="auto"
    ),
    "an adapter whose blocks begin with the last token": Variant(
        change=both(
            objective(ar_weight=0.0, block_sizes=(4,), anchor="last"),
            train(adapter=AdapterConfig(rank=2, alpha=4.0), average_last=0),
        ),
        server="auto",
    ),
    "an adapter on some layers, resumed": Variant(
        change=both(FROZEN, train(adapter=AdapterConfig(rank=1, targets=("q_proj", "down_proj")), average_last=0)),
        stopped=True,
    ),
    "products in bf16": Variant(change=train(precision="bf16"), stopped=True),
    "a learning parent": Variant(change=objective(distill_weight=1.0, distill_top_k=8)),
    "blocks that see themselves whole": Variant(
        change=both(objective(clean_attention="block", ar_weight=0.0), evaluate(modes="parent,diffusion"))
    ),
    "other noise, random sizes": Variant(
        change=objective(noise=NoiseConfig(all_mask_share=0.5), nelbo_weighted=True, block_schedule="random")
    ),
    "generated data alone": Variant(change=data(2)),
    "a chat file alone, nothing evaluated": Variant(change=both(data(1), evaluate(problems=()))),
    "answers of the parent": Variant(
        change=data(0, 2, SourceShare(source=PARENT, count=4, start=50, temperature=2.0, max_tokens=120))
    ),
    "on-policy rounds": Variant(
        change=lambda recipe: replace(
            recipe, on_policy=OnPolicyConfig(prompts=2, steps=2, max_tokens=8, policy="top_k")
        )
    ),
    "exported": Variant(after=export),
    "carried to another disk": Variant(after=carry, stopped=True),
    "two ranks": Variant(make=train_with_two_ranks),
    "begun at a stored adapter": Variant(
        make=train_on_adapter, change=ON_ADAPTER, stopped=True, server="auto", replay=6
    ),
}


def make_variant(scratch: Path, seed: int) -> tuple[str, MadeRun, AuditReport]:
    """A run of one variant, and its audit; the variants come in turn, under another seed each time."""
    name = list(VARIANTS)[seed % len(VARIANTS)]
    variant = VARIANTS[name]
    made = variant.make(scratch, interrupt=variant.stopped, change=both(train(seed=seed), variant.change))
    folder = variant.after(made.folder)
    return name, made, audit_run(folder, deep=True, server=variant.server, replay=variant.replay)


def main() -> None:
    """Make, audit, print."""
    results = []
    for seed in range(int(sys.argv[1])):
        started_s = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            name, _, report = make_variant(Path(scratch), seed)
        passed = [claim.id for claim in report.claims if claim.verdict == "pass"]
        seconds = round(time.perf_counter() - started_s, 1)
        results.append(
            {"seed": seed, "variant": name, "verdict": report.verdict, "passed": passed, "seconds": seconds}
        )
        print(json.dumps(results[-1]), flush=True)
        if report.verdict != "pass":
            print(render_text(report), flush=True)
    alarms = sum(result["verdict"] != "pass" for result in results)
    bar = {"name": "false_alarms", "value": alarms, "bar": 0, "better": "lower", "holds": alarms == 0}
    document = {
        "benchmark": "audit_clean",
        "bars": [bar],
        "num_runs": len(results),
        "runs": results,
        "hardware": {"machine": platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "ar2diff": __version__, "torch": version("torch")},
    }
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main()
