"""`ar2diff run RECIPE`: the whole chain of a recipe file on one run directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ar2diff.pipelines.recipe import Recipe
    from ar2diff.pipelines.run import RunResult

INTERRUPT_EXIT_CODE = 130


def run(
    recipe: Path,
    *,
    out: Path,
    resume: bool = False,
    resolve: bool = False,
    device: str = "cpu",
    endpoint: str | None = None,
    cache: Path | None = None,
) -> int:
    """Fetch, prepare, train, evaluate and document, as a recipe says.

    Repeat it at will: finished stages are kept, and the ledger says so.

    Args:
        recipe: A TOML file, such as recipes/smollm2-135m_cpu.toml.
        out: The run directory.
        resume: Go on from the newest checkpoint of a training that stopped.
        resolve: Accept branches as revisions of sources; they are resolved to commits and both are recorded.
        device: cpu or cuda.
        endpoint: Another hub than the default one.
        cache: Where downloads lie between runs; by default the user's cache folder.
    """
    from ar2diff.pipelines.recipe import load_recipe

    options = {"endpoint": endpoint, "resolve": resolve, "device": device}
    result = execute(load_recipe(recipe), out, resume=resume, cache=cache, options=options)
    if result.interrupted:
        print(f"stopped; go on with: ar2diff run {recipe} --out {out} --resume")
        return INTERRUPT_EXIT_CODE
    print(result.checkpoint)
    return 0


def execute(
    recipe: "Recipe", out: Path, *, resume: bool, cache: Path | None, options: Mapping[str, Any]
) -> "RunResult":
    """Run a recipe with progress on standard error, and print the comparison table.

    Args:
        options: further fields of the `RunContext`.
    """
    from rich.console import Console

    from ar2diff.cli.fetch import default_cache_dir
    from ar2diff.cli.run_view import RunView
    from ar2diff.cli.train import stop_on_ctrl_c
    from ar2diff.clock import SystemClock
    from ar2diff.pipelines.run import run_recipe
    from ar2diff.pipelines.stages import RunContext
    from ar2diff.provenance.ledger import Ledger

    clock = SystemClock()
    with (
        Ledger.open(out, clock=clock, run_id=out.resolve().name) as ledger,
        RunView(Console(stderr=True)) as view,
        stop_on_ctrl_c() as asked,
    ):
        context = RunContext(
            run_dir=out,
            cache_dir=cache or default_cache_dir(),
            ledger=ledger,
            clock=clock,
            view=view,
            **options,
        )
        result = run_recipe(recipe, context, resume=resume, stop_requested=lambda: bool(asked))
    if result.report is not None:
        Console().print(result.report.table())
    return result
