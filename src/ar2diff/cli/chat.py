"""`ar2diff chat`: talk with a model in the terminal and watch its answers being denoised. Works over a pipe too."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ar2diff.errors import Ar2diffError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from ar2diff.engine.engine import Engine
    from ar2diff.engine.generation import Pass
    from ar2diff.serve.reading.steps import StepReader

HELP = """/mode diffusion|verified|ar   how to decode
/steps N|auto                 denoising passes a block at most
/policy NAME [NUMBER]         what a pass reveals: top_k, threshold, factor, entropy, left_to_right
/tokens N                     length of an answer at most
/temperature X                0 is greedy
/thinking on|off|auto         whether the model thinks first, where its template lets one choose
/thoughts                     what it thought before its last answer
/tools FILE|none              what it may call: a JSON array as the API takes it; you type what calls give back
/settings                     what is set
/history                      the conversation so far
/reset                        forget the conversation
/help                         this list
/quit                         leave (or end of input, or Ctrl-C)
Ctrl-C                        while an answer comes: stop it and keep what is there"""


def chat(
    model: Path,
    *,
    mode: Literal["diffusion", "verified", "ar"] | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    precision: Literal["fp32", "bf16", "int8", "auto"] = "auto",
) -> None:
    """Talk with a model; /help lists what can be changed on the way.

    Args:
        model: folder of a model or of a release, a run directory (its newest checkpoint), or a .gguf file.
        mode: diffusion; verified, which gives the AR answer in fewer passes; or ar, one token at a time. Diffusion
            unless given, or ar where the model is not converted.
        max_tokens: length of an answer at most.
        temperature: 0 is greedy.
        seed: of sampling.
        precision: fp32 and bf16 run in torch; int8 runs code that is compiled for this machine on first use; auto is
            int8 where that is possible, else fp32.
    """
    from rich.console import Console

    from ar2diff.cli.generate import load_engine
    from ar2diff.cli.serve import find_model
    from ar2diff.engine.request import Request

    asked: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    asked |= {"draft_len": "auto", "copy_drafts": True}
    Request(prompt_ids=(0,), **asked)  # refused now, before a model is loaded
    engine = load_engine(find_model(model), precision)
    default = "ar" if engine.loaded.diffusion is None else "diffusion"
    conversation = Conversation(engine, Console(), asked)
    conversation.change(mode=mode or default)
    conversation.run(read_lines())


@dataclass(slots=True)
class Conversation:
    """A chat: its history, and the settings that slash commands change.

    Attributes:
        asked: fields of the next `Request`, besides the prompt.
        messages: the conversation as the API takes it.
        tools: what the model may call.
        thinking: whether it thinks; None leaves it to its template.
        open_calls: calls of the last answer whose results are still to come.
    """

    engine: "Engine"
    console: "Console"
    asked: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    thinking: bool | None = None
    open_calls: list[dict[str, Any]] = field(default_factory=list)

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
        elif line and self.open_calls:
            self._give_result(line)
        elif line:
            self._answer({"role": "user", "content": line})

    def change(self, **changed: Any) -> None:
        """Set fields of the next request.

        Raises:
            RequestError: no request may hold them, or this model cannot serve them; nothing is changed.
        """
        from ar2diff.engine.request import Request, check_request

        asked = {**self.asked, **changed}
        check_request(Request(prompt_ids=(0,), **asked), self.engine.loaded.config, self.engine.loaded.diffusion)
        self.asked = asked

    def _answer(self, *said: dict[str, Any]) -> None:
        from ar2diff.cli.chat_turn import build_message, open_turn
        from ar2diff.cli.denoise_view import describe_speed, show_steps
        from ar2diff.engine.request import Request
        from ar2diff.serve.reading.dialect import Dialect
        from ar2diff.serve.reading.steps import StepReader

        tokenizer = self.engine.loaded.tokenizer
        messages = [*self.messages, *said]
        chat = open_turn(Dialect(tokenizer), messages, self.tools, thinking=self.thinking)
        reading, parts = StepReader(chat.plan), list[str]()
        steps = self.engine.stream(Request(prompt_ids=tuple(chat.prompt_ids), reader=chat.plan, **self.asked))
        try:
            generation = show_steps(self.console, tokenizer, _note(steps, parts, reading), reading)
        except KeyboardInterrupt:
            self._say("stopped")
        else:
            if self.console.is_terminal:
                self.console.print(describe_speed(generation), style="dim", highlight=False)
        text = "".join(parts)
        if text or reading.calls:
            answer = build_message(text, reading.reasoning, reading.calls, num_before=len(messages))
            self.messages, self.open_calls = [*messages, answer], list(answer.get("tool_calls", ()))
            self._ask_for_result()

    def _give_result(self, text: str) -> None:
        """Take a line as what the first open call gives back; the model goes on after the last one."""
        result = {"role": "tool", "tool_call_id": self.open_calls[0]["id"], "content": text}
        if len(self.open_calls) > 1:
            self.messages, self.open_calls = [*self.messages, result], self.open_calls[1:]
            self._ask_for_result()
        else:
            self._answer(result)

    def _ask_for_result(self) -> None:
        if self.open_calls:
            self._say(f"what {self.open_calls[0]['function']['name']} gives back is the next line")

    def _command(self, line: str) -> None:
        name, *words = line.split()
        commands: dict[str, Callable[[list[str]], str]] = {
            "/mode": self._set_mode,
            "/steps": self._set_steps,
            "/policy": self._set_policy,
            "/tokens": self._set_tokens,
            "/temperature": self._set_temperature,
            "/thinking": self._set_thinking,
            "/thoughts": lambda _: self._describe_thoughts(),
            "/tools": self._set_tools,
            "/settings": lambda _: self._describe_settings(),
            "/history": lambda _: self._describe_history(),
            "/reset": self._reset,
            "/help": lambda _: HELP,
        }
        if name not in commands:
            raise RequestError("unknown command", given=name, fix="/help lists them")
        self._say(commands[name](words))

    def _set_mode(self, words: list[str]) -> str:
        self.change(mode=" ".join(words))
        return f"mode {self.asked['mode']}"

    def _set_steps(self, words: list[str]) -> str:
        self.change(denoising_steps=None if words == ["auto"] else _read_number(words, int))
        return f"steps {words[0]}"

    def _set_policy(self, words: list[str]) -> str:
        parameter = _read_number(words[1:], float) if words[1:] else None
        self.change(policy=words[0] if words else "", policy_parameter=parameter)
        return f"policy {' '.join(words)}"

    def _set_tokens(self, words: list[str]) -> str:
        self.change(max_tokens=_read_number(words, int))
        return f"tokens {words[0]}"

    def _set_temperature(self, words: list[str]) -> str:
        self.change(temperature=_read_number(words, float))
        return f"temperature {words[0]}"

    def _set_thinking(self, words: list[str]) -> str:
        choices = {"on": True, "off": False, "auto": None}
        word = " ".join(words)
        if word not in choices:
            raise RequestError("thinking is on, off or auto", given=word)
        self._try_settings(self.tools, choices[word])
        return f"thinking {word}"

    def _set_tools(self, words: list[str]) -> str:
        from ar2diff.cli.chat_turn import read_tools

        tools = [] if words == ["none"] else read_tools(Path(" ".join(words)))
        self._try_settings(tools, self.thinking)
        return f"tools {', '.join(tool['function']['name'] for tool in tools) or 'none'}"

    def _try_settings(self, tools: list[Any], thinking: bool | None) -> None:
        """Keep them where a turn could be opened with them."""
        from ar2diff.cli.chat_turn import open_turn
        from ar2diff.serve.reading.dialect import Dialect

        probe = [{"role": "user", "content": "x"}]
        open_turn(Dialect(self.engine.loaded.tokenizer), probe, tools, thinking=thinking)
        self.tools, self.thinking = tools, thinking

    def _describe_thoughts(self) -> str:
        from ar2diff.cli.denoise_view import make_visible

        answers = [message for message in self.messages if message["role"] == "assistant"]
        text = answers[-1].get("reasoning_content", "") if answers else ""
        text = text or "it thought nothing"
        return make_visible(text) if self.console.is_terminal else text

    def _describe_settings(self) -> str:
        from ar2diff.engine.request import Request

        request = Request(prompt_ids=(0,), **self.asked)
        number = "" if request.policy_parameter is None else f" {request.policy_parameter:g}"
        return (
            f"mode {request.mode}, steps {request.denoising_steps or 'auto'}, policy {request.policy}{number}, "
            f"tokens {request.max_tokens}, temperature {request.temperature:g}"
        )

    def _describe_history(self) -> str:
        from ar2diff.cli.denoise_view import make_visible

        turns = [f"{message['role']}: {message['content']}{_list_calls(message)}" for message in self.messages]
        text = "\n".join(turns) or "nothing was said yet"
        return make_visible(text) if self.console.is_terminal else text

    def _reset(self, words: list[str]) -> str:
        del words
        self.messages, self.open_calls = [], []
        return "the conversation is forgotten"

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def read_lines() -> Iterator[str]:
    """Lines that a person types, with those before at the arrow keys, or lines that come over a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its arrow keys, where the system has it
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line


def _note(steps: Iterator["Pass"], said: list[str], reading: "StepReader") -> Iterator["Pass"]:
    for step in steps:
        said.append(step.text)
        reading.advance(step)
        yield step


def _list_calls(message: dict[str, Any]) -> str:
    called = [call["function"] for call in message.get("tool_calls", ())]
    return "".join(f" [calls {function['name']} {function['arguments']}]" for function in called)


def _read_number(words: list[str], kind: Callable[[str], Any]) -> Any:
    try:
        return kind(" ".join(words))
    except ValueError:
        raise RequestError("not a number", given=" ".join(words)) from None
