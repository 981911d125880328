"""Reading one field of a row as the type it must have; the complaint names file and row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ar2diff.data.rows import Row, row_error
from ar2diff.tokenizer import Message

T = TypeVar("T")


def require_field(row: Row, path: Path, name: str, kind: type[T]) -> T:
    """The field `name` as a `kind`.

    Raises:
        DataError: it is missing or of another type.
    """
    value = row.content.get(name)
    if not isinstance(value, kind):
        problem = f"no {kind.__name__} field {name!r}"
        raise row_error(
            path, row.number, problem, f"The row has {_shown(row.content)}: check the recipe and the file"
        )
    return value


def optional_list(row: Row, name: str) -> Sequence[Any] | None:
    """The field `name` where it is a list, else None."""
    value = row.content.get(name)
    return value if isinstance(value, list) else None


def user_turn(text: str) -> tuple[Message, ...]:
    """A prompt of one user turn."""
    return ({"role": "user", "content": text},)


def _shown(content: dict[str, Any]) -> str:
    names = ", ".join(sorted(content)[:8])
    return f"the fields {names}" if names else "no fields"
