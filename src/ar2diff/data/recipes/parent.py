"""Answers that the parent model wrote, one a row, as `ar2diff answers` keeps them; a cut answer is dropped.

A row has `id`, `prompt` (turns), `response`, `finish_reason` and `source`; rows of a generating task have `task` and
`passage` too. The model itself is never seen here: its root and its settings are in `receipt.json` beside the rows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ar2diff.data.config import ANSWER_FIELDS, SourceShare
from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.recipes.fields import require_field
from ar2diff.data.rows import Row, read_rows, row_error
from ar2diff.errors import DataError
from ar2diff.files import read_json
from ar2diff.tokenizer import Message

RECEIPT_NAME = "receipt.json"
# Beside the reasons that an answer ends by itself: why there is none, or no whole one.
REASONS = {
    "length": "truncated answer",
    "prompt_length": "truncated prompt",
    "prompt_empty": "empty prompt",
    "prompt_refused": "prompt does not fit the parent",
}


def read_documents(path: Path, source: str) -> Iterator[Document | DroppedRow]:
    """Yield one document or one dropped row for each answer.

    Raises:
        DataError: the file is broken, or a row is no answer of a parent.
    """
    for row in read_rows(path):
        row_id = require_field(row, path, "id", str)
        response = require_field(row, path, "response", str)
        finish_reason = require_field(row, path, "finish_reason", str)
        place = f"{source}#{row.number}"
        prompt = _read_prompt(row, path)
        if finish_reason not in ("stop", *REASONS):
            raise row_error(path, row.number, f"unknown finish_reason {finish_reason!r}", "Answer the prompts again")
        if finish_reason in REASONS:
            yield DroppedRow(id=row_id, source=place, reason=REASONS[finish_reason])
        elif not response.strip():
            yield DroppedRow(id=row_id, source=place, reason="empty response")
        else:
            texts = {name: _optional_text(row, name) for name in ("task", "passage")}
            yield Document(id=row_id, prompt=prompt, response=response, source=place, **texts)


def check_answers(folder: Path, share: SourceShare) -> None:
    """Refuse answers of another source, to other prompts of it, or with other sampling settings than the share has.

    Raises:
        DataError: names the settings that differ; or the folder has no receipt.
    """
    receipt = read_json(folder / RECEIPT_NAME, error=DataError)
    asked = describe_share(share)
    stored = receipt.get("request") if isinstance(receipt, dict) else None
    if not isinstance(stored, dict):
        raise DataError("not a finished folder of answers", given=str(folder), fix="Run `ar2diff answers` for it")
    if other := [name for name, value in asked.items() if stored.get(name) != value]:
        found = ", ".join(f"{name} {stored.get(name)}" for name in other)
        fix = f"Ask for {found}, or answer the prompts again"
        raise DataError(f"the answers were made with another {' and '.join(other)}", given=str(folder), fix=fix)


def describe_share(share: SourceShare) -> dict[str, Any]:
    """What of a share decides which prompts are answered, and how."""
    return {name: getattr(share, name) for name in ("source", "count", "start", "recipe", *ANSWER_FIELDS)}


def _read_prompt(row: Row, path: Path) -> tuple[Message, ...]:
    turns = require_field(row, path, "prompt", list)
    if not all(
        isinstance(t, dict) and isinstance(t.get("role"), str) and isinstance(t.get("content"), str) for t in turns
    ):
        raise row_error(path, row.number, "a turn of the prompt without role and content", "Answer the prompts again")
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)


def _optional_text(row: Row, name: str) -> str:
    value = row.content.get(name, "")
    return value if isinstance(value, str) else ""
