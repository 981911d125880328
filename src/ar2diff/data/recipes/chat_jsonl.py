"""Chats and question-answer pairs of `.jsonl`, `.jsonl.gz` and `.parquet` files.

A row is `{"messages": [{"role": ..., "content": ...}, ...]}` in the OpenAI form, its last turn the assistant's,
or a pair: prompt and response, prompt and completion, question and answer. An `id` is kept, and must be unique.
`reasoning_content` of the last turn goes before it as a thinking section.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.recipes.fields import require_field, user_turn
from ar2diff.data.rows import Row, read_rows, row_error
from ar2diff.data.thinking import join_thinking
from ar2diff.tokenizer import Message

PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("prompt", "canonical_solution"),
)
ID_FIELDS = ("id", "task_id", "question_id")
ROLES = ("system", "user", "assistant")
SHAPE = 'Write {"messages": [...]} that end with an assistant turn, or {"prompt": ..., "response": ...}'


def read_documents(path: Path, source: str) -> Iterator[Document | DroppedRow]:
    """Yield one document a row; empty responses and turns that are not text are dropped.

    Raises:
        DataError: the file is broken, a row has neither form, or an id comes twice.
    """
    seen: dict[str, int] = {}
    for row in read_rows(path):
        row_id = _find_id(row)
        if row_id is not None and seen.setdefault(row_id, row.number) != row.number:
            problem = f"the id {row_id!r} is also that of row {seen[row_id]}"
            raise row_error(path, row.number, problem, "Give every row its own id, or none")
        yield _read_row(row, path, source, row_id or f"row-{row.number}")


def _find_id(row: Row) -> str | None:
    return next((str(row.content[name]) for name in ID_FIELDS if row.content.get(name) is not None), None)


def _read_row(row: Row, path: Path, source: str, row_id: str) -> Document | DroppedRow:
    place = f"{source}#{row.number}"
    turns = _read_turns(row, path)
    if turns is None:
        return DroppedRow(id=row_id, source=place, reason="a turn is not text")
    *prompt, response = turns
    if not response["content"].strip():
        return DroppedRow(id=row_id, source=place, reason="empty response")
    if not any(message["content"].strip() for message in prompt):
        return DroppedRow(id=row_id, source=place, reason="empty prompt")
    return Document(id=row_id, prompt=tuple(prompt), response=response["content"], source=place)


def _read_turns(row: Row, path: Path) -> list[Message] | None:
    """All turns with the response last; None where one is not text."""
    if "messages" in row.content:
        return _read_messages(row, path)
    for prompt_name, response_name in PAIRS:
        if prompt_name in row.content and response_name in row.content:
            prompt = require_field(row, path, prompt_name, str)
            response = require_field(row, path, response_name, str)
            return [*user_turn(prompt), {"role": "assistant", "content": response}]
    fields = ", ".join(sorted(row.content)[:8]) or "none"
    raise row_error(path, row.number, f"neither messages nor a prompt with a response; its fields: {fields}", SHAPE)


def _read_messages(row: Row, path: Path) -> list[Message] | None:
    messages = require_field(row, path, "messages", list)
    turns: list[Message] = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
            raise row_error(path, row.number, "a message without role (system, user, assistant) and content", SHAPE)
        text = _read_content(message["content"])
        if text is None:
            return None
        turns.append({"role": str(message["role"]), "content": text})
    thinking = messages[-1].get("reasoning_content") if messages else None
    if isinstance(thinking, str) and thinking.strip():
        turns[-1] = {"role": turns[-1]["role"], "content": join_thinking(thinking, turns[-1]["content"])}
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise row_error(path, row.number, "the messages do not end with an answer of the assistant", SHAPE)
    return turns


def _read_content(content: Any) -> str | None:
    """A string, or the joined texts of content parts; None where there is anything but text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [_read_part(part) for part in content]
    known = [text for text in texts if text is not None]
    return "".join(known) if known and len(known) == len(texts) else None


def _read_part(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None
