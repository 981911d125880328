"""TACO, train split: programming problem to its shortest Python solution without a judge's own code in it."""

import json
from collections.abc import Iterator
from pathlib import Path

from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.recipes.fields import require_field, user_turn
from ar2diff.data.rows import Row, read_rows, row_error

# Left in a solution by the site that ran it; code around them belongs to the test harness.
HARNESS_MARKS = ("Driver Code Starts", "Driver Code Ends", "User function Template", "Initial Template for")


def read_documents(path: Path, source: str) -> Iterator[Document | DroppedRow]:
    """Yield one document or one dropped row for each row.

    Raises:
        DataError: the file is broken or lacks the data set's columns.
    """
    for row in read_rows(path):
        question = require_field(row, path, "question", str).strip()
        place = f"{source}#{row.number}"
        row_id = f"row-{row.number}"
        solutions = _read_solutions(row, path)
        clean = [text for text in solutions if not any(mark in text for mark in HARNESS_MARKS)]
        if reason := _reason_to_drop(question, solutions, clean):
            yield DroppedRow(id=row_id, source=place, reason=reason)
        else:
            response = f"```python\n{min(clean, key=len).strip()}\n```"
            yield Document(id=row_id, prompt=user_turn(_ask(row, question)), response=response, source=place)


def _reason_to_drop(question: str, solutions: list[str], clean: list[str]) -> str:
    if not question:
        return "empty prompt"
    if not solutions:
        return "no solution"
    return "" if clean else "only solutions with harness code"


def _ask(row: Row, question: str) -> str:
    starter = row.content.get("starter_code")
    return (
        f"{question}\n\nStart from:\n{starter.strip()}" if isinstance(starter, str) and starter.strip() else question
    )


def _read_solutions(row: Row, path: Path) -> list[str]:
    """The data set keeps its solutions as a JSON list inside a string."""
    text = row.content.get("solutions")
    try:
        solutions = json.loads(text) if isinstance(text, str) and text else text or []
    except ValueError as error:
        raise row_error(path, row.number, f"solutions is not JSON: {error}", "Fetch the file again") from None
    if not isinstance(solutions, list):
        raise row_error(path, row.number, "solutions is not a list", "Check the recipe and the file")
    return [solution for solution in solutions if isinstance(solution, str) and solution.strip()]
