"""Text to structured output: a short text becomes JSON or a Markdown table; right or wrong, nothing between.

Four kinds in turn: people (a list of objects), an order (nested), a table, a note with missing values (null).
An answer is right where it parses to the reference: JSON with equal values of equal types, whatever the order
of keys and the spaces between tokens; a table with equal cells after the spaces around them are dropped.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from ar2diff.tasks import notes, passages
from ar2diff.tasks.draw import Draw
from ar2diff.tasks.passages import Exercise
from ar2diff.tasks.problem import Problem, Split

NAME = "structured"
DOMAIN = "structured"
VERSION = "1"

KINDS: dict[str, Callable[[Draw], Exercise]] = {
    "people": passages.build_people,
    "order": passages.build_order,
    "table": passages.build_table,
    "note": notes.build_note,
}
LAYOUTS = ("{ask}\n\n{text}", "{ask}\nText: {text}", "{text}\n\n{ask}", "Text: {text}\n{ask}")
SEPARATOR_CELL = re.compile(r":?-{3,}:?")


def build_problems(*, split: Split, count: int, start: int = 0) -> list[Problem]:
    """Problems `start` to `start + count - 1` of `split`; the split is part of each problem's random key."""
    return [_build_problem(split, index) for index in range(start, start + count)]


def _build_problem(split: Split, index: int) -> Problem:
    kinds = list(KINDS)
    kind = kinds[index % len(kinds)]
    draw = Draw(NAME, VERSION, split, index)
    exercise = KINDS[kind](draw)
    content = draw.pick(LAYOUTS).format(ask=exercise.instruction, text=exercise.passage)
    return Problem(
        id=f"{NAME}/{split}/{kind}-{index}",
        task=NAME,
        domain=DOMAIN,
        messages=({"role": "user", "content": content},),
        reference=exercise.answer,
        passage=exercise.passage,
    )


def score(problem: Problem, answer_text: str) -> bool:
    """True where the answer means exactly what the reference does, with nothing before or after it."""
    answer, reference = answer_text.strip(), problem.reference
    if reference.startswith("|"):
        return parse_table(answer) == parse_table(reference)
    try:
        return is_same_json(parse_json(answer), parse_json(reference))
    except (ValueError, RecursionError):
        return False


def parse_json(text: str) -> Any:
    """The value of a JSON text; what the JSON grammar lacks (NaN, Infinity, a key twice) is a `ValueError`."""
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def is_same_json(left: Any, right: Any) -> bool:
    """Equality with types: 1, 1.0 and true are three values; the order of keys does not count."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same_json(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(is_same_json, left, right))
    return bool(left == right)


def parse_table(text: str) -> list[list[str]] | None:
    """The cells of a Markdown table without its separator row, or None where the text is not just one table."""
    rows = []
    for line in text.strip().splitlines():
        stripped = line.strip()
        if len(stripped) < 2 or not (stripped.startswith("|") and stripped.endswith("|")):
            return None
        rows.append([" ".join(cell.split()) for cell in stripped[1:-1].split("|")])
    if len(rows) < 2 or not all(SEPARATOR_CELL.fullmatch(cell) for cell in rows[1]):
        return None
    return [rows[0], *rows[2:]] if len({len(row) for row in rows}) == 1 else None


def template_texts() -> tuple[str, ...]:
    """All fixed wording: instructions, sentence frames, key and column names, `null`."""
    tables, facts = passages.TABLE_SUBJECTS, notes.NOTE_SUBJECTS
    key_maps = [passages.PEOPLE_KEYS, passages.ORDER_KEYS, passages.ITEM_KEYS, *(t.columns for t in tables)]
    key_maps += [note.keys for note in facts]
    texts = [*passages.PEOPLE_FRAMES, *passages.ORDER_FRAMES, *passages.ITEM_FRAMES, "null and", *LAYOUTS]
    texts += [frame for table in tables for frame in table.frames]
    texts += [frame for note in facts for frame in note.openings]
    texts += [frame for note in facts for frames in note.sentences.values() for frame in frames]
    texts += [*passages.PEOPLE_ASKS, *passages.ORDER_ASKS, *passages.TABLE_ASKS, *notes.NOTE_ASKS]
    texts += [name for keys in key_maps for names in keys.values() for name in names]
    return tuple(re.sub(r"\{\w+\}", " ", text) for text in texts)
