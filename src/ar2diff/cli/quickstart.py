"""`ar2diff quickstart`: from nothing to a converted, measured model, on a bare machine, in a quarter of an hour."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ar2diff.cli.run import execute, say_how_to_go_on

if TYPE_CHECKING:
    from ar2diff.pipelines.run import RunResult

RECIPE_NAME = "smollm2-135m_cpu"
# Of the kind that the recipe's data teaches.
EXAMPLE_PROMPT = (
    "Turn the text into a one-line JSON list of objects with name, city and work, one per person. "
    "Text: Ana Silva (31) came to Porto to work as a baker."
)


def quickstart(
    *,
    minutes: float | None = None,
    out: Path = Path("runs/quickstart"),
    resume: bool = False,
    cache: Path | None = None,
) -> int:
    """Convert SmolLM2-135M to block diffusion, compare it with its parent, and show it denoise.

    Needs no network beyond the package index: the base model comes inside a package.

    Args:
        minutes: Training time; the recipe's own by default.
        out: The run directory.
        resume: Go on from the newest checkpoint of a training that stopped.
        cache: Where downloads lie between runs; by default the user's cache folder.
    """
    from dataclasses import replace

    from ar2diff.pipelines.recipe import find_recipe, load_recipe

    recipe = load_recipe(find_recipe(RECIPE_NAME))
    if minutes is not None:
        recipe = replace(recipe, train=replace(recipe.train, minutes=minutes, steps=None))
    result = execute(recipe, out, resume=resume, cache=cache, options={})
    if result is None or result.interrupted:
        given = "" if minutes is None else f" --minutes {minutes:g}"
        return say_how_to_go_on(f"{_command_as_typed()} quickstart{given}", out)
    _show_denoising(result)
    _say_what_next(result, out)
    return 0


def _show_denoising(result: "RunResult") -> None:
    """One held-out problem, answered pass by pass."""
    from rich.console import Console

    from ar2diff.cli.denoise_view import describe_speed, print_passes
    from ar2diff.cli.generate import load_engine
    from ar2diff.data.config import EvaluationShare
    from ar2diff.engine.request import Request
    from ar2diff.pipelines.stages import build_problems

    engine = load_engine(result.checkpoint, "auto")
    tokenizer = engine.loaded.tokenizer
    problem = build_problems([EvaluationShare(task="structured", count=1)])[0]
    prompt_ids = tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True)
    request = Request(prompt_ids=tuple(prompt_ids), max_tokens=96, policy="threshold", policy_parameter=0.9)
    console = Console()
    console.print(f"\n[bold]One answer being denoised[/bold]\n{problem.messages[-1]['content']}\n", highlight=False)
    generation = print_passes(console, tokenizer, engine.stream(request))
    console.print(f"\n{generation.text}\n{describe_speed(generation)}", highlight=False)


def _say_what_next(result: "RunResult", out: Path) -> None:
    command = _command_as_typed()
    lines = (
        ("chat", f"{command} chat {result.checkpoint}"),
        ("one answer", f"{command} generate {result.checkpoint} --mode verified --prompt '{EXAMPLE_PROMPT}'"),
        ("serve", f"{command} serve {result.checkpoint}"),
        ("train for longer", f"{command} quickstart --minutes 60 --out runs/longer"),
        ("loss curve", f"{out / 'loss.png'}"),
        ("the table as JSON", f"{out / 'eval.json'}"),
        ("what was downloaded", f"{out / 'DOWNLOADS.md'}"),
    )
    print()
    for what, how in lines:
        print(f"{what + ':':<22}{how}")


def _command_as_typed() -> str:
    """The path this program was started by where the shell does not find it as `ar2diff`."""
    started = Path(sys.argv[0])
    return str(started) if started.name == "ar2diff" and shutil.which("ar2diff") is None else "ar2diff"
