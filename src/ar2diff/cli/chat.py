"""`ar2diff chat`: talk with a model in the terminal and watch its answers being denoised. Works over a pipe too."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ar2diff.errors import Ar2diffError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from ar2diff.engine.engine import Engine
    from ar2diff.tokenizer import Message

HELP = """/mode diffusion|verified|ar   how to decode
/steps N|auto                 denoising passes a block at most
/policy NAME [NUMBER]         what a pass reveals: top_k, threshold, factor, entropy, left_to_right
/reset                        forget the conversation
/help                         this list
/quit                         leave (or end of input)"""


def chat(
    model: Path,
    *,
    mode: Literal["diffusion", "verified", "ar"] = "diffusion",
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    precision: Literal["fp32", "bf16", "int8", "auto"] = "auto",
) -> None:
    """Talk with a model; /help lists what can be changed on the way.

    Args:
        model: folder of a model, or a .gguf file.
        mode: diffusion; verified, which gives the AR answer in fewer passes; or ar, one token at a time.
        max_tokens: length of an answer at most.
        temperature: 0 is greedy.
        seed: of sampling.
        precision: fp32 and bf16 run in torch; int8 runs code that is compiled for this machine on first use; auto is
            int8 where that is possible, else fp32.
    """
    from rich.console import Console

    from ar2diff.cli.generate import load_engine
    from ar2diff.engine.request import Request

    console = Console()
    asked: dict[str, Any] = {"mode": mode, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    Request(prompt_ids=(0,), **asked)  # refused now, not after each line
    Conversation(load_engine(model, precision), console, asked).run(read_lines(console))


@dataclass(slots=True)
class Conversation:
    """A chat: its history, and the settings that slash commands change.

    Attributes:
        asked: fields of the next `Request`, besides the prompt.
    """

    engine: "Engine"
    console: "Console"
    asked: dict[str, Any]
    messages: list["Message"] = field(default_factory=list)

    def run(self, lines: Iterator[str]) -> None:
        """Answer line by line; a fault ends its own answer only."""
        for line in lines:
            if line.strip() == "/quit":
                return
            try:
                self._take(line.strip())
            except Ar2diffError as error:
                self._say(f"error: {error.one_line()}")

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            self._command(line)
        elif line:
            self._answer(line)

    def _answer(self, text: str) -> None:
        from ar2diff.cli.denoise_view import describe_speed, show_steps
        from ar2diff.engine.request import Request

        tokenizer = self.engine.loaded.tokenizer
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        ids = tokenizer.encode_chat(messages, add_generation_prompt=True)
        steps = self.engine.stream(Request(prompt_ids=tuple(ids), **self.asked))
        generation = show_steps(self.console, tokenizer, steps)
        self.messages = [*messages, {"role": "assistant", "content": generation.text}]
        if self.console.is_terminal:
            self.console.print(describe_speed(generation), style="dim", highlight=False)

    def _command(self, line: str) -> None:
        name, *words = line.split()
        commands: dict[str, Callable[[list[str]], str]] = {
            "/mode": self._set_mode,
            "/steps": self._set_steps,
            "/policy": self._set_policy,
            "/reset": self._reset,
            "/help": lambda _: HELP,
        }
        if name not in commands:
            raise RequestError("unknown command", given=name, fix="/help lists them")
        self._say(commands[name](words))

    def _set_mode(self, words: list[str]) -> str:
        self._change(mode=" ".join(words))
        return f"mode {self.asked['mode']}"

    def _set_steps(self, words: list[str]) -> str:
        self._change(denoising_steps=None if words == ["auto"] else _read_number(words, int))
        return f"steps {words[0]}"

    def _set_policy(self, words: list[str]) -> str:
        parameter = _read_number(words[1:], float) if words[1:] else None
        self._change(policy=words[0] if words else "", policy_parameter=parameter)
        return f"policy {' '.join(words)}"

    def _reset(self, words: list[str]) -> str:
        del words
        self.messages = []
        return "the conversation is forgotten"

    def _change(self, **changed: Any) -> None:
        from ar2diff.engine.request import Request

        asked = {**self.asked, **changed}
        Request(prompt_ids=(0,), **asked)  # refuses what no request may hold
        self.asked = asked

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def read_lines(console: "Console") -> Iterator[str]:
    """Lines that a person types, or that come over a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    while True:
        try:
            yield console.input("[bold]> [/bold]")
        except EOFError:
            return


def _read_number(words: list[str], kind: Callable[[str], Any]) -> Any:
    try:
        return kind(" ".join(words))
    except ValueError:
        raise RequestError("not a number", given=" ".join(words)) from None
