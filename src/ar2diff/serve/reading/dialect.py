"""What a model's chat template says of it: in which format it writes calls, and whether it thinks."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ar2diff.engine.constraint import Constraint
from ar2diff.engine.schema_words import check_words
from ar2diff.errors import RequestError
from ar2diff.serve.reading.formats import PROBE, Format, write_json, write_terminal
from ar2diff.serve.reading.hermes import Hermes
from ar2diff.serve.reading.llama3 import Llama3
from ar2diff.serve.reading.minicpm5 import MiniCpm5
from ar2diff.serve.reading.reader import THINK, THINK_END, ReadingPlan
from ar2diff.serve.reading.values import Tools
from ar2diff.tokenizer import Message, Tokenizer

FORMATS: tuple[Format, ...] = (MiniCpm5(), Hermes(), Llama3())
SWITCH = "enable_thinking"


@dataclass(frozen=True)
class Dialect:
    """A model's ways, found from its chat template."""

    tokenizer: Tokenizer

    @property
    def thinks(self) -> bool:
        """Whether the template knows of thinking."""
        template = self.tokenizer.chat_template or ""
        return THINK in template and THINK_END in template

    @property
    def has_switch(self) -> bool:
        """Whether `enable_thinking` means anything to the template."""
        return SWITCH in (self.tokenizer.chat_template or "")

    @cached_property
    def format(self) -> Format | None:
        """The format of calls: the one in which the template writes a call; None where it writes none."""
        call = {"id": "callprobe", "type": "function", "function": PROBE}
        turns: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            rendered = self.tokenizer.render_chat(turns, add_generation_prompt=False)
        except RequestError:
            return None
        bare = "".join(rendered.split())
        return next((known for known in FORMATS if known.sample in bare), None)

    def plan(self, tools: Tools | None, *, is_open: bool = False, is_single: bool = False) -> ReadingPlan | None:
        """How an answer is read; None where all of it is content."""
        looked_for = self.format if tools else None
        if not self.thinks and looked_for is None:
            return None
        return ReadingPlan(
            tokenizer=self.tokenizer,
            thinks=self.thinks,
            is_open=is_open,
            format=looked_for,
            tools=tools or {},
            is_single=is_single,
        )

    def constrain(
        self,
        tools: Tools | None,
        schema: Mapping[str, Any] | None,
        *,
        may_think: bool,
        is_open: bool,
        is_single: bool,
    ) -> Constraint:
        """The form of an answer that is calls of the tools, or JSON under the schema, perhaps after thinking.

        Raises:
            RequestError: it is too long, or a schema has a keyword that JSON Schema does not know.
        """
        for name, parameters in (tools or {}).items():
            check_words(parameters, f"the schema of tool {name!r}")
        check_words(schema or {})
        rules, bodies = [], []
        if tools:
            assert self.format is not None
            is_repeated = self.format.has_parallel and not is_single
            rules += [
                f"calls: call{' (GAP call)*' if is_repeated else ''}",
                self.format.write_grammar(tools, self.tokenizer),
            ]
            rules += ['GAP: "\\n"'] if is_repeated else []
            bodies.append("calls")
        if schema is not None:
            rules.append(f"json: {write_json(schema)}")
            bodies.append("json")
        start = f"({' | '.join(bodies)})"
        if may_think and self.thinks:
            opening = "" if is_open else write_terminal(THINK, self.tokenizer)
            rules.append(f"thought: {opening} thinking /\\n{{0,4}}/")
            rules.append(self._write_thinking())
            start = f"thought{'' if is_open else '?'} {start}"
        return Constraint(kind="lark", text="\n".join([f"start: {start}", *rules]) + "\n")

    def _write_thinking(self) -> str:
        if self.tokenizer.token_to_id(THINK_END) is None:
            return f'thinking[suffix="{THINK_END}"]: /(?s:.*)/'
        return f"thinking: /(?s:.*)/ {write_terminal(THINK_END, self.tokenizer)}"
