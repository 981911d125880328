"""What benchmarks share whose problems come from a published file: reading columns, final answers, choices."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ar2diff.errors import ConfigError
from ar2diff.tasks.problem import Problem, Split

ANSWER_MARK = "Answer:"
LETTERS = "ABCD"
_LETTER = re.compile(r"\(?([A-D])\)?(?![A-Za-z])")


def refuse_building(*, split: Split, count: int, start: int = 0) -> list[Problem]:  # noqa: ARG001
    """`Task.build_problems` of a stored benchmark.

    Raises:
        ConfigError: always, since the rows must be given.
    """
    raise ConfigError("the rows of this benchmark lie in a file", fix="Name it: TASK?source=local:<file>")


def read_text(row: Mapping[str, Any], name: str) -> str:
    """The column `name`, text that is not empty.

    Raises:
        KeyError: there is no such column.
        ValueError: it holds something else.
    """
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"the column {name!r} holds no text")
    return value.strip()


def read_first(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of the columns `names` that there is: editions of a benchmark name them differently."""
    return read_text(row, next((name for name in names if name in row), names[0]))


def find_final(answer_text: str) -> str:
    """What follows the last `Answer:`, or the whole text; one line."""
    lines = answer_text.rpartition(ANSWER_MARK)[2].strip().splitlines()
    return lines[0].strip() if lines else ""


def ask_choice(question: str, options: Sequence[str]) -> tuple[str, str]:
    """A question with lettered options: as it is compared, and as it is asked."""
    listed = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
    passage = "\n".join([question, *listed])
    return passage, f"{passage}\n\nFinish with a line `{ANSWER_MARK}` and the letter."


def score_choice(problem: Problem, answer_text: str) -> bool:
    """True where the letter after the last `Answer:` is the right one.

    Raises:
        ConfigError: the benchmark keeps the right answer of this problem to itself.
    """
    if not problem.reference:
        raise ConfigError("the right answer is not published", given=problem.id, fix="Score another split")
    return find_choice(answer_text) == find_final(problem.reference)


def find_choice(answer_text: str) -> str | None:
    """The letter after the last `Answer:`, or that the whole text begins with; None where there is none."""
    found = _LETTER.match(find_final(answer_text))
    return None if found is None else found.group(1)
