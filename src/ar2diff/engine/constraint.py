"""What form an answer must have, as data: any JSON object, a JSON schema, a regular expression, a grammar.

Free of torch and of the grammar library, which `engine/grammar.py` loads once a constraint is used.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ar2diff.engine.schema_words import check_words
from ar2diff.errors import RequestError

ConstraintKind = Literal["json_schema", "regex", "lark"]
MAX_CONSTRAINT_LEN = 256 * 1024
# The grammar library's. Runs of white space are bounded, so that no model fills an answer with them; indented JSON
# still fits. A keyword that cannot be kept is an error.
JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}", "lenient": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A form that the whole answer has; hashable, so that it is compiled once for many requests.

    Attributes:
        kind: how `text` is read. "json_schema": a schema as JSON text. "regex": the whole answer matches it, in the
            syntax of Rust's `regex` (no look-around, no back-references). "lark": a grammar in llguidance's variant
            of Lark, in which a control token is written `<[id]>`.
        text: the schema, expression or grammar.
    """

    kind: ConstraintKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            kinds = ", ".join(get_args(ConstraintKind))
            raise RequestError(f"a constraint's kind is one of {kinds}", given=self.kind)
        if len(self.text) > MAX_CONSTRAINT_LEN:
            problem = f"a constraint has at most {MAX_CONSTRAINT_LEN} characters"
            raise RequestError(problem, given=len(self.text), fix="Simplify it")
        if self.kind == "json_schema":
            check_words(_parse(self.text))

    @classmethod
    def json_object(cls) -> "Constraint":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> "Constraint":
        """JSON that is valid under `schema`.

        Raises:
            RequestError: the schema is no JSON value, nested too deeply or too long, or has a keyword that
                JSON Schema does not know.
        """
        try:
            text = json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise RequestError("the schema is no plain JSON, or nested too deeply") from None
        return cls(kind="json_schema", text=text)

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """Text that `pattern` matches from its first to its last character."""
        return cls(kind="regex", text=pattern)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("the schema is no plain JSON, or nested too deeply") from None
