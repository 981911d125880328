"""One answer drawn while it is denoised: masks dim, revealed tokens coloured by confidence, settled text plain.

On a terminal the answer's end is redrawn at every step and the whole stays there; anywhere else only the settled text
is written, as it comes. Thinking is dim while it lasts and folded into a line afterwards; elsewhere it is left out.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from ar2diff.engine.generation import Generation, Pass
    from ar2diff.serve.reading.steps import StepReader
    from ar2diff.tokenizer import Tokenizer

MASK_SIGN, LINE_END_SIGN = "░", "⏎"
# What a terminal would obey is shown by its sign instead; tabs and line ends stay.
_SIGNS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_SIGNS |= {127: "\u2421"} | dict.fromkeys(range(128, 160), "\ufffd")
# From unsure to sure; the last holds for everything above.
_COLOURS = ((0.5, "red"), (0.8, "yellow"), (0.95, "cyan"), (math.inf, "green"))


def colour_of(confidence: float) -> str:
    """The colour that stands for a probability."""
    return next(colour for bound, colour in _COLOURS if confidence < bound)


def make_visible(text: str) -> str:
    """The text without anything that a terminal takes for a command."""
    return text.translate(_SIGNS)


class DenoiseView:
    """What one answer looks like after each step.

    Args:
        reading: what it has thought and called so far, where someone keeps that.
    """

    def __init__(self, tokenizer: "Tokenizer", reading: "StepReader | None" = None) -> None:
        self._tokenizer, self._reading = tokenizer, reading
        self._confidence: dict[int, float] = {}
        self._settled = ""

    def advance(self, step: "Pass") -> Text:
        """The picture after `step`: settled text, then the block's tokens that are not settled yet."""
        self._confidence |= {reveal.position: math.exp(reveal.logprob) for reveal in step.reveals}
        self._settled += step.text
        picture = self.draw_settled()
        if step.generation is None and None in step.token_ids:
            for place in range(step.token_ids.index(None), len(step.token_ids)):
                picture.append_text(self._draw_token(step.token_ids[place], step.start + place))
        return picture

    def draw_settled(self, *, is_over: bool = False) -> Text:
        """The settled text; before it the thinking, in one line once something else is there or all is over."""
        picture = Text()
        if self._reading is not None and self._reading.reasoning:
            is_folded = is_over or bool(self._settled)
            count = self._reading.num_reasoning_tokens
            thinking = f"thought for {count} tokens\n" if is_folded else make_visible(self._reading.reasoning)
            picture.append(thinking, style="dim italic")
        return picture.append(make_visible(self._settled))

    def draw_block(self, step: "Pass") -> Text:
        """The block of `step` alone, settled or not."""
        picture = Text()
        for place, token_id in enumerate(step.token_ids):
            picture.append_text(self._draw_token(token_id, step.start + place))
        return picture

    def _draw_token(self, token_id: int | None, position: int) -> Text:
        if token_id is None:
            return Text(MASK_SIGN, style="dim")
        text = self._tokenizer.decode([token_id]).replace("\n", LINE_END_SIGN)
        return Text(make_visible(text), style=colour_of(self._confidence[position]))


def show_steps(
    console: Console, tokenizer: "Tokenizer", steps: Iterator["Pass"], reading: "StepReader | None" = None
) -> "Generation":
    """Draw an answer while it is made, its calls at the end, and return it.

    Args:
        reading: what the answer has thought and called, advanced by whoever yields the steps.
    """
    generation: Generation | None = None
    if console.is_terminal:
        view = DenoiseView(tokenizer, reading)
        try:
            with Live(console=console, auto_refresh=False, transient=True) as live:
                for step in steps:
                    live.update(_keep_end(view.advance(step), console), refresh=True)
                    generation = step.generation
        finally:  # an answer that is stopped leaves what it said, too
            console.print(view.draw_settled(is_over=True), highlight=False)
    else:
        for step in steps:
            console.print(step.text, end="", markup=False, highlight=False, soft_wrap=True)
            generation = step.generation
        console.print()
    assert generation is not None
    for call in [] if reading is None else reading.calls:
        arguments = make_visible(call.arguments) if console.is_terminal else call.arguments
        console.print(f"calls {call.name} {arguments}", markup=False, highlight=False, soft_wrap=True)
    return generation


def _keep_end(picture: Text, console: Console) -> Text:
    """The last lines that fit: what happens, happens there."""
    return Text("\n").join(picture.wrap(console, console.width)[1 - console.height :])


def describe_speed(generation: "Generation") -> str:
    """One line on what an answer cost."""
    count, seconds = len(generation.token_ids), generation.decode_s
    speed = f"{count / seconds:.0f} tokens/s" if seconds > 0 else "too short to time"
    return (
        f"{count} tokens in {generation.num_forward_passes} forward passes "
        f"({generation.tokens_per_forward:.2f} a pass), {speed}"
    )


def print_passes(
    console: Console, tokenizer: "Tokenizer", steps: Iterator["Pass"], *, max_lines: int = 32
) -> "Generation":
    """Print the block at hand after every pass, one line each, on any console; returns the answer.

    Args:
        max_lines: passes that are printed; the rest of a long answer is not.
    """
    view = DenoiseView(tokenizer)
    generation: Generation | None = None
    for idx, step in enumerate(steps):
        view.advance(step)
        if idx < max_lines:
            line = Text(f"block {step.block_idx + 1}, pass {step.pass_idx + 1}  ", style="dim")
            console.print(line.append_text(view.draw_block(step)), highlight=False, soft_wrap=True)
        elif idx == max_lines:
            console.print(Text("and so on", style="dim"))
        generation = step.generation
    assert generation is not None
    return generation
