"""`ar2diff quickstart`: from nothing to a converted, measured model, on a bare machine, in a quarter of an hour.

Where the package has an adapter of the model, it is applied and shown at once, then trained on for some minutes, and
measured again. Elsewhere, and with --from-scratch, the base itself is converted.
"""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ar2diff.cli.run import execute, open_context, say_how_to_go_on

if TYPE_CHECKING:
    from ar2diff.evals.report import EvalReport
    from ar2diff.pipelines.recipe import Recipe
    from ar2diff.pipelines.stages import RunContext

ADAPTER_NAME = "smollm2-135m"
ADAPTER_RECIPE_NAME, RECIPE_NAME = "smollm2-135m_quickstart", "smollm2-135m_cpu"
# Of the kind that the recipe's data teaches.
EXAMPLE_PROMPT = (
    "Turn the text into a one-line JSON list of objects with name, city and work, one per person. "
    "Text: Ana Silva (31) came to Porto to work as a baker."
)


def quickstart(
    *,
    minutes: float | None = None,
    from_scratch: bool = False,
    out: Path = Path("runs/quickstart"),
    resume: bool = False,
    cache: Path | None = None,
) -> int:
    """Show SmolLM2-135M denoise under the adapter that came along, train it on, and compare it with its parent.

    Needs no network beyond the package index: the base model comes inside a package. Where no adapter came along, the
    base itself is converted, as with --from-scratch.

    Args:
        minutes: Training time; the recipe's own by default. 0 shows the adapter as it came and trains nothing.
        from_scratch: Convert the base itself, without the adapter.
        out: The run directory.
        resume: Go on from the newest checkpoint of a training that stopped.
        cache: Where downloads lie between runs; by default the user's cache folder.
    """
    from dataclasses import replace

    from ar2diff.pipelines.recipe import find_recipe, load_recipe
    from ar2diff.sources.shipped import list_shipped

    has_adapter = not from_scratch and ADAPTER_NAME in list_shipped()
    recipe = load_recipe(find_recipe(ADAPTER_RECIPE_NAME if has_adapter else RECIPE_NAME))
    look = _FirstLook(recipe) if has_adapter else None
    if look is not None and minutes == 0:
        return _only_look(look, out, cache)
    if minutes is not None:
        recipe = replace(recipe, train=replace(recipe.train, minutes=minutes, steps=None))
    if not has_adapter and not from_scratch:
        print("no adapter came with this ar2diff: converting the base itself, as with --from-scratch", flush=True)
    given = " --from-scratch" * from_scratch + ("" if minutes is None else f" --minutes {minutes:g}")
    result = execute(recipe, out, resume=resume, cache=cache, options={}, show_start=look)
    if result is None or result.interrupted:
        return say_how_to_go_on(f"{_command_as_typed()} quickstart{given}", out)
    if look is None:
        _show_denoising(result.checkpoint)
    elif look.report is not None and result.report is not None:
        _print_difference(look.report, result.report)
    _say_what_next(result.checkpoint, out, " --from-scratch" * from_scratch)
    return 0


class _FirstLook:
    """Shows the model that training begins at, and keeps what was measured of it."""

    def __init__(self, recipe: "Recipe") -> None:
        self.recipe = recipe
        self.report: EvalReport | None = None

    def __call__(self, base: Path, start: Path, context: "RunContext") -> None:
        """One answer pass by pass, then a small comparison."""
        import torch

        from ar2diff.cli.run import print_table
        from ar2diff.pipelines.evaluation import torch_threads
        from ar2diff.pipelines.first_look import measure_start

        context.view.stage("A first look")
        # Engines change the number of threads, and training comes after.
        with torch_threads(torch.get_num_threads()):
            _show_denoising(start)
        self.report = measure_start(base, start, self.recipe.evaluate, context)
        context.view.settle()
        print_table(self.report)


def _only_look(look: _FirstLook, out: Path, cache: Path | None) -> int:
    """The adapter on its base, shown and not trained; the same folder can be trained in later."""
    from ar2diff.pipelines.run import begin, check_run
    from ar2diff.pipelines.stages import write_documents

    check_run(look.recipe, out, resume=False)
    with open_context(out, cache=cache, options={}) as context:
        base, start = begin(look.recipe, context)
        look(base, start, context)
        write_documents(out)
    command = _command_as_typed()
    _print_lines(*_uses(start), ("train it on", f"{command} quickstart --out {out}"), _downloads(out))
    return 0


def _print_difference(before: "EvalReport", after: "EvalReport") -> None:
    from rich.console import Console

    from ar2diff.evals.report import render_difference

    Console().print("", render_difference(before, after), sep="\n")


def _show_denoising(model: Path) -> None:
    """One held-out problem, answered pass by pass."""
    from rich.console import Console

    from ar2diff.cli.denoise_view import describe_speed, print_passes
    from ar2diff.cli.generate import load_engine
    from ar2diff.data.config import EvaluationShare
    from ar2diff.engine.request import Request
    from ar2diff.pipelines.stages import build_problems

    engine = load_engine(model, "auto")
    tokenizer = engine.loaded.tokenizer
    problem = build_problems([EvaluationShare(task="structured", count=1)])[0]
    prompt_ids = tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True)
    request = Request(prompt_ids=tuple(prompt_ids), max_tokens=96, policy="threshold", policy_parameter=0.9)
    console = Console()
    console.print(f"\n[bold]One answer being denoised[/bold]\n{problem.messages[-1]['content']}\n", highlight=False)
    generation = print_passes(console, tokenizer, engine.stream(request))
    console.print(f"\n{generation.text}\n{describe_speed(generation)}", highlight=False)


def _say_what_next(model: Path, out: Path, flags: str) -> None:
    _print_lines(
        *_uses(model),
        ("train for longer", f"{_command_as_typed()} quickstart{flags} --minutes 60 --out runs/longer"),
        ("loss curve", f"{out / 'loss.png'}"),
        ("the table as JSON", f"{out / 'eval.json'}"),
        _downloads(out),
    )


def _uses(model: Path) -> tuple[tuple[str, str], ...]:
    command = _command_as_typed()
    return (
        ("chat", f"{command} chat {model}"),
        ("one answer", f"{command} generate {model} --mode verified --prompt '{EXAMPLE_PROMPT}'"),
        ("serve", f"{command} serve {model}"),
    )


def _downloads(out: Path) -> tuple[str, str]:
    return "what was downloaded", f"{out / 'DOWNLOADS.md'}"


def _print_lines(*lines: tuple[str, str]) -> None:
    print()
    for what, how in lines:
        print(f"{what + ':':<22}{how}")


def _command_as_typed() -> str:
    """The path this program was started by where the shell does not find it as `ar2diff`."""
    started = Path(sys.argv[0])
    return str(started) if started.name == "ar2diff" and shutil.which("ar2diff") is None else "ar2diff"
