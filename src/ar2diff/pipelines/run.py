"""A whole conversion, from a recipe: fetch, prepare, train, evaluate, document. What is done already is kept."""

from dataclasses import dataclass
from pathlib import Path

from ar2diff.errors import RunError
from ar2diff.evals.report import EvalReport
from ar2diff.hashing import sha256_json
from ar2diff.models.loading import load_tokenizer
from ar2diff.pipelines.evaluation import evaluate_run
from ar2diff.pipelines.recipe import Recipe
from ar2diff.pipelines.stages import (
    RunContext,
    Stop,
    fetch_base,
    prepare_data,
    train_model,
    write_documents,
)
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.train.checkpoint import list_checkpoints

FINISHED_EVENT = "conversion_finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to; `report` is None where training was stopped early or nothing was to be evaluated."""

    base: Path
    checkpoint: Path
    report: EvalReport | None
    interrupted: bool


def run_recipe(
    recipe: Recipe, context: RunContext, *, resume: bool = False, stop_requested: Stop = lambda: False
) -> RunResult:
    """Do what the recipe says on the context's run directory; finished stages of the same settings are kept.

    Args:
        resume: go on from the newest checkpoint of an unfinished training.

    Raises:
        RunError: the directory holds an unfinished training and `resume` is not set, or another run.
    """
    base = fetch_base(recipe.base, context)
    prepare_data(recipe.data, load_tokenizer(base), context)
    checkpoint, interrupted = _convert(recipe, base, context, resume=resume, stop_requested=stop_requested)
    report = None
    if recipe.evaluate.problems and not interrupted:
        report = evaluate_run(base, checkpoint, recipe.evaluate, context)
    write_documents(context.run_dir)
    return RunResult(base=base, checkpoint=checkpoint, report=report, interrupted=interrupted)


def _convert(
    recipe: Recipe, base: Path, context: RunContext, *, resume: bool, stop_requested: Stop
) -> tuple[Path, bool]:
    """The final checkpoint, and whether training was stopped early."""
    settings = sha256_json(recipe.train.as_json())
    finished = find_events(context.run_dir / LEDGER_NAME, FINISHED_EVENT)
    found = list_checkpoints(context.run_dir)
    if finished and found and finished[-1].data["settings_sha256"] == settings:
        context.view.stage("Converting: done already")
        return found[-1], False
    if found and not resume and not finished:
        raise RunError(
            "the folder holds an unfinished training",
            given=str(context.run_dir),
            fix="Go on with --resume, or start anew with another --out",
        )
    result = train_model(recipe, base, context, resume=resume, stop_requested=stop_requested)
    if not result.interrupted:
        context.ledger.append(FINISHED_EVENT, {"settings_sha256": settings, "checkpoint": result.checkpoint.name})
    return result.checkpoint, result.interrupted
