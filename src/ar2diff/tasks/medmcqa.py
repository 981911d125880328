"""MedMCQA: questions of medical entrance examinations with four options (Pal et al. 2022, arXiv:2203.14371).

Columns: `id`, `question`, `opa` to `opd`, `cop` (0 to 3; -1 or none in the test split, whose answers are not
published).
"""

from collections.abc import Mapping
from typing import Any

from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import ANSWER_MARK, LETTERS, ask_choice, read_text

NAME = "medmcqa"
DOMAIN = "medicine"
VERSION = "1"
OPTIONS = ("opa", "opb", "opc", "opd")


def read_problem(row: Mapping[str, Any], number: int) -> Problem:
    """The problem of a row; its reference is empty where the right answer is not published."""
    passage, asked = ask_choice(read_text(row, "question"), [read_text(row, name) for name in OPTIONS])
    right = -1 if row.get("cop") is None else row["cop"]
    if isinstance(right, bool) or not isinstance(right, int) or not -1 <= right < len(LETTERS):
        raise ValueError("the column 'cop' is not 0 to 3, or -1 where it is not published")
    return Problem(
        id=f"{NAME}/{row.get('id') or number}",
        task=NAME,
        domain=DOMAIN,
        messages=({"role": "user", "content": asked},),
        reference=f"{ANSWER_MARK} {LETTERS[right]}" if right >= 0 else "",
        passage=passage,
    )
