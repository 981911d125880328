"""Honest runs of many seeds and settings, each audited with --deep: `python tests/audit/clean_runs.py COUNT [FILE]`.

Prints a line a run; the last line is one JSON document. Ends with 1 where an honest run does not pass.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from made_run import MadeRun, make_run

from ar2diff.audit.report import render_text
from ar2diff.audit.verify import audit_run
from ar2diff.pipelines.recipe import Recipe
from ar2diff.train.objective import ObjectiveConfig

# Each differs from the run of the tests in what it names; they come in turn, under another seed each time.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one block size": {"objective": ObjectiveConfig(block_sizes=(4,))},
    "logits not shifted": {"objective": ObjectiveConfig(block_sizes=(4,), shift_logits=False)},
    "long blocks": {"objective": ObjectiveConfig(block_sizes=(8,))},
    "rows in two parts": {"micro": 2, "accum": 2},
    "a time budget": {"steps": None, "minutes": 0.02, "save_every": 1, "average_last": 0},
    "never saved before the end": {"save_every": None, "average_last": 0},
}


def vary(seed: int) -> tuple[str, Any]:
    """The name of a variant, and the change of the recipe that makes it."""
    name = list(VARIANTS)[seed % len(VARIANTS)]

    def change(recipe: Recipe) -> Recipe:
        changed = replace(recipe, train=replace(recipe.train, seed=seed, **VARIANTS[name]))
        if changed.train.objective.shift_logits:
            return changed
        # Without shifted logits there is no autoregressive path to measure.
        return replace(changed, evaluate=replace(changed.evaluate, modes="parent,diffusion"))

    return name, change


def make_variant(scratch: Path, seed: int) -> tuple[str, MadeRun]:
    """A run of one variant; every other one is stopped and resumed, where there is something to resume from."""
    name, change = vary(seed)
    return name, make_run(scratch, interrupt=seed % 2 == 0 and "time" not in name, change=change)


def main() -> None:
    """Make, audit, print."""
    results = []
    for seed in range(int(sys.argv[1])):
        with tempfile.TemporaryDirectory() as scratch:
            name, made = make_variant(Path(scratch), seed)
            report = audit_run(made.folder, deep=True)
        results.append({"seed": seed, "variant": name, "verdict": report.verdict})
        print(json.dumps(results[-1]), flush=True)
        if report.verdict != "pass":
            print(render_text(report), flush=True)
    alarms = sum(result["verdict"] != "pass" for result in results)
    bar = {"name": "false_alarms", "value": alarms, "bar": 0, "better": "lower", "holds": alarms == 0}
    document = {"benchmark": "audit_clean", "bars": [bar], "num_runs": len(results), "runs": results}
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main()
