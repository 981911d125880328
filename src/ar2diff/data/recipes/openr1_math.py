"""OpenR1-Math-220k, train split: problem to the shortest complete, verified solution.

Rows with `source == 'math'` are skipped, since MATH-500 is drawn from the same collection.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.recipes.fields import optional_list, require_field, user_turn
from ar2diff.data.rows import Row, read_rows

FLAG_FIELDS = ("correctness_math_verify", "correctness_llama")


def read_documents(path: Path, source: str) -> Iterator[Document | DroppedRow]:
    """Yield one document or one dropped row for each row of a parquet file of the data set.

    Raises:
        DataError: the file is broken or lacks the data set's columns.
    """
    for row in read_rows(path):
        problem = require_field(row, path, "problem", str)
        row_id = str(row.content.get("uuid") or f"row-{row.number}")
        place = f"{source}#{row.number}"
        reason, response = _choose_response(row, path)
        if reason or not problem.strip():
            yield DroppedRow(id=row_id, source=place, reason=reason or "empty prompt")
        else:
            yield Document(id=row_id, prompt=user_turn(problem), response=response, source=place)


def _choose_response(row: Row, path: Path) -> tuple[str, str]:
    """A reason to drop the row, or its response."""
    if row.content.get("source") == "math":
        return "source is math", ""
    generations = require_field(row, path, "generations", list)
    complete = _flags(row, "is_reasoning_complete", len(generations))
    verified = _verified(row, len(generations))
    usable = [bool(text) and finished for text, finished in zip(generations, complete, strict=True)]
    if not any(usable):
        return "no complete generation", ""
    texts = [text for text, use, right in zip(generations, usable, verified, strict=True) if use and right]
    return ("", min(texts, key=len).strip()) if texts else ("no verified generation", "")


def _flags(row: Row, name: str, size: int) -> Sequence[Any]:
    """One flag a generation; all true where the row has none."""
    flags = optional_list(row, name)
    return flags if flags is not None and len(flags) == size else [True] * size


def _verified(row: Row, size: int) -> list[bool]:
    """Whether any of the checks that the row carries holds for each generation; true where it carries none."""
    checks = [flags for name in FLAG_FIELDS if (flags := optional_list(row, name)) and len(flags) == size]
    return [any(flags[index] for flags in checks) for index in range(size)] if checks else [True] * size
