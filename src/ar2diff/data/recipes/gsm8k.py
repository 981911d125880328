"""GSM8K, train split: word problem to worked answer, asked and ended as the benchmark's test split is.

The published answers hold calculator marks such as `<<48/2=24>>` for programs; readers never see them, so they are
dropped, or kept under another name. The last line has the final number without thousands separators.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.recipes.fields import require_field, user_turn
from ar2diff.data.rows import read_rows
from ar2diff.tasks.gsm8k import ASK, MARK, read_number
from ar2diff.tasks.stored import ANSWER_MARK

FINAL = "####"


def _read(path: Path, source: str, *, keep_marks: bool) -> Iterator[Document | DroppedRow]:
    for row in read_rows(path):
        question = require_field(row, path, "question", str).strip()
        steps, _, final = require_field(row, path, "answer", str).rpartition(FINAL)
        row_id, place = f"row-{row.number}", f"{source}#{row.number}"
        worked = (steps if keep_marks else MARK.sub("", steps)).strip()
        number = read_number(final)
        if reason := _reason_to_drop(question, worked, number is not None):
            yield DroppedRow(id=row_id, source=place, reason=reason)
            continue
        prompt = user_turn(f"{question}\n{ASK}")
        yield Document(id=row_id, prompt=prompt, response=f"{worked}\n{ANSWER_MARK} {number}", source=place)


def _reason_to_drop(question: str, worked: str, has_number: bool) -> str:
    if not question:
        return "empty prompt"
    if not has_number:
        return "no final number"
    return "" if worked else "no worked answer"


# Yield one document or one dropped row for each row of the train split; a row without the columns is a DataError.
read_documents: Callable[[Path, str], Iterator[Document | DroppedRow]] = partial(_read, keep_marks=False)
read_marked: Callable[[Path, str], Iterator[Document | DroppedRow]] = partial(_read, keep_marks=True)
