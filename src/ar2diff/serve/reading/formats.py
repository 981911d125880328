"""The formats in which models write calls, one file each, and what they have in common."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ar2diff.engine.constraint import JSON_OPTIONS
from ar2diff.serve.reading.values import Call, Tools
from ar2diff.tokenizer import Tokenizer


class Format(Protocol):
    """How a model writes a call.

    Attributes:
        sample: how it writes `PROBE`, white space left out.
        begin, end: what encloses a call; without an end, a call may also stand bare at the start of the content.
        inner: further texts of the format that may be control tokens.
        has_parallel: whether several calls may follow each other.
    """

    sample: str
    begin: str
    end: str | None
    inner: tuple[str, ...]
    has_parallel: bool

    def parse(self, block: str, tools: Tools) -> tuple[Call, str]:
        """The call that a text from `begin` to `end` holds, and the text after it.

        Raises:
            ValueError: it is no call of one of the tools.
            Unfinished: more text may make it one.
        """
        ...

    def write_grammar(self, tools: Tools, tokenizer: Tokenizer) -> str:
        """Rules of a grammar in llguidance's Lark; `call` is one call of one of the tools."""
        ...


PROBE: dict[str, Any] = {"name": "probe_call", "arguments": {"probe_key": "probe_value"}}
"""A call whose rendering shows which format a chat template has."""


def write_terminal(text: str, tokenizer: Tokenizer) -> str:
    """A marker in a grammar: the token where the vocabulary has one, else its text."""
    token_id = tokenizer.token_to_id(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def write_json(schema: Mapping[str, Any]) -> str:
    """JSON under a schema, as part of a grammar."""
    return f"%json {json.dumps({'x-guidance': JSON_OPTIONS, **schema}, ensure_ascii=False)}"


def write_json_calls(tools: Tools, key: str) -> str:
    """One of the tools' calls as `{"name": ..., key: {...}}`, as part of a grammar."""
    options: Sequence[Mapping[str, Any]] = [
        {
            "type": "object",
            # As in `values.is_parameter`: where a schema lists properties, others need its word.
            "properties": {
                "name": {"const": name},
                key: {"additionalProperties": "properties" not in schema, **schema},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, schema in tools.items()
    ]
    # References count from the root of a schema: one %json a tool keeps each at the root of its own.
    rules = [f"body{idx}: {write_json(_hoist(option, key))}" for idx, option in enumerate(options)]
    return "\n".join([f"body: {' | '.join(f'body{idx}' for idx in range(len(rules)))}", *rules])


def _hoist(option: Mapping[str, Any], key: str) -> dict[str, Any]:
    schema = option["properties"][key]
    definitions = {name: schema.pop(name) for name in ("$defs", "definitions") if name in schema}
    return {**option, **definitions}
