"""`ar2diff run RECIPE`: the whole chain of a recipe file on one run directory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ar2diff.evals.report import EvalReport
    from ar2diff.evals.speed import SpeedReport
    from ar2diff.pipelines.recipe import Recipe
    from ar2diff.pipelines.run import RunResult, ShowStart
    from ar2diff.pipelines.stages import RunContext, Stop

INTERRUPT_EXIT_CODE = 130
WIDE = 140


def run(
    recipe: Path,
    *,
    out: Path,
    resume: bool = False,
    resolve: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    endpoint: str | None = None,
    cache: Path | None = None,
    tensorboard: bool = False,
) -> int:
    """Fetch, prepare, train, evaluate and document, as a recipe says.

    Repeat it at will: finished stages are kept, and the ledger says so.

    Args:
        recipe: A TOML file, or the name of a shipped recipe, such as smollm2-135m_cpu.
        out: The run directory.
        resume: Go on from the newest checkpoint of a training that stopped.
        resolve: Accept branches as revisions of sources; they are resolved to commits and both are recorded.
        device: cpu or cuda.
        endpoint: Another hub than the default one.
        cache: Where downloads lie between runs; by default the user's cache folder.
        tensorboard: Also write the training's steps to OUT/tensorboard; needs the extra train.
    """
    from ar2diff.pipelines.recipe import RECIPE_SUFFIX, find_recipe, load_recipe

    loaded = load_recipe(recipe if recipe.suffix == RECIPE_SUFFIX else find_recipe(str(recipe)))
    options = {"endpoint": endpoint, "resolve": resolve, "device": device, "tensorboard": tensorboard}
    result = execute(loaded, out, resume=resume, cache=cache, options=options)
    if result is None or result.interrupted:
        return say_how_to_go_on(f"ar2diff run {recipe}", out)
    print(result.checkpoint)
    return 0


def execute(
    recipe: "Recipe",
    out: Path,
    *,
    resume: bool,
    cache: Path | None,
    options: Mapping[str, Any],
    show_start: "ShowStart | None" = None,
) -> "RunResult | None":
    """Run a recipe with progress on standard error, and print the comparison table; None after Ctrl-C.

    Args:
        options: further fields of the `RunContext`.
        show_start: as of `run_recipe`.
    """
    from ar2diff.pipelines.run import check_run, run_recipe
    from ar2diff.pipelines.stages import check_device

    check_device(options.get("device", "cpu"))
    check_run(recipe, out, resume=resume)
    try:
        with open_context(out, cache=cache, options=options) as context:
            result = run_recipe(recipe, context, resume=resume, watch_for_stop=_watch_ctrl_c, show_start=show_start)
    except KeyboardInterrupt:
        return None
    if result.report is not None:
        print_table(result.report)
    return result


@contextmanager
def open_context(out: Path, *, cache: Path | None, options: Mapping[str, Any]) -> Iterator["RunContext"]:
    """What the stages of a recipe work with in `out`; arguments as of `execute`."""
    from rich.console import Console

    from ar2diff.cli.allocator import keep_freed_memory
    from ar2diff.cli.fetch import default_cache_dir, default_library_dir
    from ar2diff.cli.open_ledger import open_ledger
    from ar2diff.cli.run_view import RunView
    from ar2diff.clock import SystemClock
    from ar2diff.pipelines.stages import RunContext

    keep_freed_memory()
    clock = SystemClock()
    with (
        open_ledger(out, clock=clock, run_id=out.resolve().name) as ledger,
        RunView(Console(stderr=True)) as view,
    ):
        yield RunContext(
            run_dir=out,
            cache_dir=cache or default_cache_dir(),
            library_dir=default_library_dir(),
            ledger=ledger,
            clock=clock,
            view=view,
            **options,
        )


def print_table(report: "EvalReport | SpeedReport") -> None:
    """The comparison on standard output; where that is no terminal, wide enough for the whole table."""
    from rich.console import Console

    is_terminal = Console().is_terminal
    console = Console(width=None if is_terminal else WIDE)
    for table in report.tables():
        console.print(table)


def say_how_to_go_on(command: str, out: Path) -> int:
    """Print the command that continues a stopped run; returns the exit code of Ctrl-C."""
    from ar2diff.pipelines.run import needs_resume

    print(f"stopped; go on with: {command} --out {out}{' --resume' if needs_resume(out) else ''}")
    return INTERRUPT_EXIT_CODE


@contextmanager
def _watch_ctrl_c() -> Iterator["Stop"]:
    from ar2diff.cli.train import stop_on_ctrl_c

    with stop_on_ctrl_c() as asked:
        yield lambda: bool(asked)
