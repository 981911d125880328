"""MedMCQA, train split: question and options to the answer's letter, after the explanation where there is one."""

from collections.abc import Iterator
from pathlib import Path

from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.recipes.fields import require_field, user_turn
from ar2diff.data.rows import Row, read_rows, row_error

LETTERS = "ABCD"
OPTION_FIELDS = ("opa", "opb", "opc", "opd")


def read_documents(path: Path, source: str) -> Iterator[Document | DroppedRow]:
    """Yield one document or one dropped row for each row.

    Raises:
        DataError: the file is broken, lacks the data set's columns, or counts options in two ways.
    """
    first = _find_first(path)
    for row in read_rows(path):
        row_id = str(row.content.get("id") or f"row-{row.number}")
        place = f"{source}#{row.number}"
        question = require_field(row, path, "question", str).strip()
        options = [require_field(row, path, name, str).strip() for name in OPTION_FIELDS]
        answer = require_field(row, path, "cop", int) - first
        if reason := _reason_to_drop(row, question, options, answer):
            yield DroppedRow(id=row_id, source=place, reason=reason)
        else:
            listed = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
            prompt = user_turn("\n".join([question, *listed]))
            yield Document(id=row_id, prompt=prompt, response=_respond(row, answer), source=place)


def _find_first(path: Path) -> int:
    """The number of the first option: the authors' own files count from 1, other mirrors from 0 with -1 for none.

    Raises:
        DataError: the file has both 0 and 4.
    """
    seen: dict[int, int] = {}
    for row in read_rows(path):
        answer = row.content.get("cop")
        if answer in (0, len(LETTERS)):
            seen.setdefault(answer, row.number)
    if len(seen) > 1:
        number = max(seen.values())
        problem = f"cop counts from 1 here, and from 0 in row {min(seen.values())}, or the reverse"
        raise row_error(path, number, problem, "Keep the rows of different mirrors in files of their own")
    return 1 if len(LETTERS) in seen else 0


def _reason_to_drop(row: Row, question: str, options: list[str], answer: int) -> str:
    if not question or not all(options):
        return "empty question or option"
    if not 0 <= answer < len(LETTERS):
        return "no answer (held-out row)"
    return "several options are right" if row.content.get("choice_type") == "multi" else ""


def _respond(row: Row, answer: int) -> str:
    explanation = row.content.get("exp")
    final = f"Answer: {LETTERS[answer]}"
    return f"{explanation.strip()}\n{final}" if isinstance(explanation, str) and explanation.strip() else final
