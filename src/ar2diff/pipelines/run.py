"""A whole conversion, from a recipe: fetch, prepare, train, evaluate, document. What is done already is kept.

Training begins at the fetched base, or at what a stored adapter makes of it; evaluation compares with the base.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ar2diff.errors import RunError
from ar2diff.evals.report import EvalReport
from ar2diff.hashing import sha256_json
from ar2diff.pipelines.evaluation import evaluate_run, find_report
from ar2diff.pipelines.on_policy import ROUND_EVENT, train_on_policy
from ar2diff.pipelines.recipe import Recipe
from ar2diff.pipelines.stages import (
    RunContext,
    Stop,
    fetch_base,
    prepare_data,
    train_model,
    write_documents,
)
from ar2diff.pipelines.start import check_adapter, make_start
from ar2diff.pipelines.targets import record_targets
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.train.checkpoint import CHECKPOINTS_DIR, list_checkpoints, verify_checkpoint
from ar2diff.train.setup import RUN_NAME

RECIPE_EVENT, FINISHED_EVENT = "recipe_started", "conversion_finished"
# What makes two runs the same; an evaluation may be asked anew of a finished run.
IDENTITY = ("base", "data", "train", "on_policy")

WatchForStop = Callable[[], AbstractContextManager[Stop]]
# Is given the base and the model that training begins at.
ShowStart = Callable[[Path, Path, RunContext], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to; `report` is None where training was stopped early or nothing was to be evaluated."""

    base: Path
    checkpoint: Path
    report: EvalReport | None
    interrupted: bool


@contextmanager
def never_stop() -> Iterator[Stop]:
    """For runs that nobody stops early."""
    yield lambda: False


def run_recipe(
    recipe: Recipe,
    context: RunContext,
    *,
    resume: bool = False,
    watch_for_stop: WatchForStop = never_stop,
    show_start: ShowStart | None = None,
) -> RunResult:
    """Do what the recipe says on the context's run directory; finished stages of the same settings are kept.

    Args:
        resume: go on from the newest checkpoint of an unfinished training.
        watch_for_stop: entered around the training alone; what it yields is asked between steps.
        show_start: called before anything else is made, as long as the run has no checkpoint.

    Raises:
        RunError, ConfigError: as `check_run`.
        CheckpointError: the checkpoint to go on from, or the finished one, is damaged.
        ModelError: a stored adapter is of another base.
    """
    check_run(recipe, context.run_dir, resume=resume)
    _record_recipe(recipe, context)
    base, start = begin(recipe, context)
    if show_start is not None and not list_checkpoints(context.run_dir):
        show_start(base, start, context)
    prepare_data(recipe.data, base, context)
    checkpoint, interrupted = _convert(recipe, start, context, resume=resume, watch_for_stop=watch_for_stop)
    if recipe.on_policy is not None and not interrupted:
        with watch_for_stop() as stop_requested:
            checkpoint, interrupted = train_on_policy(recipe, base, checkpoint, context, stop_requested)
    report = None
    if recipe.evaluate.problems and not interrupted:
        report = _evaluate(recipe, base, checkpoint, context)
    record_targets(checkpoint, context.ledger)
    write_documents(context.run_dir)
    return RunResult(base=base, checkpoint=checkpoint, report=report, interrupted=interrupted)


def begin(recipe: Recipe, context: RunContext) -> tuple[Path, Path]:
    """Bring the base into the run and put the recipe's adapter on it; both models, the same where there is none."""
    base = fetch_base(recipe.base, context)
    return base, make_start(recipe.base, base, context)


def check_run(recipe: Recipe, run_dir: Path, *, resume: bool) -> None:
    """Refuse, before anything is written, what this folder cannot be.

    Raises:
        RunError: the folder belongs to another run, or holds an unfinished training and `resume` is not set, or
            has no checkpoint to go on from and it is.
        ConfigError, ModelError, SourceError: as `check_adapter`.
    """
    recorded = find_events(run_dir / LEDGER_NAME, RECIPE_EVENT)
    if not recorded and ((run_dir / RUN_NAME).exists() or list_checkpoints(run_dir)):
        raise RunError("the folder belongs to another run", given=str(run_dir), fix="Choose another folder")
    asked = recipe.as_json()
    other = [name for name in IDENTITY if recorded and recorded[-1].data["recipe"].get(name) != asked.get(name)]
    if other:
        raise RunError(
            f"the folder belongs to another run: other settings in section {' and '.join(other)}",
            given=str(run_dir),
            fix="Choose another folder, or repeat that run's settings",
        )
    if resume and not list_checkpoints(run_dir):
        raise RunError("there is no checkpoint to go on from", given=str(run_dir), fix="Run without --resume")
    if needs_resume(run_dir) and not resume:
        raise RunError(
            "the folder holds an unfinished training",
            given=str(run_dir),
            fix="Go on with --resume, or start anew with another --out",
        )
    check_adapter(recipe, run_dir)


def needs_resume(run_dir: Path) -> bool:
    """Whether the folder holds a training that was stopped after a checkpoint."""
    return bool(list_checkpoints(run_dir)) and _finished_checkpoint(run_dir) is None


def _record_recipe(recipe: Recipe, context: RunContext) -> None:
    recorded = find_events(context.run_dir / LEDGER_NAME, RECIPE_EVENT)
    content = recipe.as_json()
    if not recorded or recorded[-1].data["recipe"] != content:
        context.ledger.append(RECIPE_EVENT, {"recipe": content, "sha256": sha256_json(content)})


def _finished_checkpoint(run_dir: Path) -> Path | None:
    finished = find_events(run_dir / LEDGER_NAME, FINISHED_EVENT)
    path = run_dir / CHECKPOINTS_DIR / finished[-1].data["checkpoint"] if finished else None
    return path if path in list_checkpoints(run_dir) else None


def _convert(
    recipe: Recipe, start: Path, context: RunContext, *, resume: bool, watch_for_stop: WatchForStop
) -> tuple[Path, bool]:
    """The final checkpoint, and whether training was stopped early."""
    finished = _finished_checkpoint(context.run_dir)
    if finished is not None:
        context.view.stage("Converting: done already")
        verify_checkpoint(finished)
        return finished, False
    with watch_for_stop() as stop_requested:
        result = train_model(recipe, start, context, resume=resume, stop_requested=stop_requested)
    if not result.interrupted:
        data = {"checkpoint": result.checkpoint.name, "tensor_root": result.tensor_root}
        context.ledger.append(FINISHED_EVENT, data)
    return result.checkpoint, result.interrupted


def _evaluate(recipe: Recipe, base: Path, checkpoint: Path, context: RunContext) -> EvalReport:
    ended = find_events(context.run_dir / LEDGER_NAME, ROUND_EVENT if recipe.on_policy else FINISHED_EVENT)
    root = ended[-1].data["tensor_root"]
    report = find_report(context.run_dir, recipe.evaluate, root)
    if report is not None:
        context.view.stage("Evaluating: done already")
        return report
    return evaluate_run(base, checkpoint, recipe.evaluate, context)
