"""GPQA diamond: graduate-level science questions with four options (Rein et al. 2023, arXiv:2311.12022).

Its authors ask that the text stay unpublished, so blocklists, receipts and reports hold hashes alone.
Columns: `Question`, `Correct Answer`, `Incorrect Answer 1` to `3`, `Record ID`.
"""

from collections.abc import Mapping
from typing import Any

from ar2diff.tasks.draw import Draw
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import ANSWER_MARK, LETTERS, ask_choice, read_text

NAME = "gpqa_diamond"
DOMAIN = "science"
VERSION = "1"
OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def read_problem(row: Mapping[str, Any], number: int) -> Problem:
    """The problem of a row; the order of its options is drawn, the same every time."""
    question = read_text(row, "Question")
    order = Draw(NAME, VERSION, number).sample(range(len(OPTIONS)), len(OPTIONS))
    _, asked = ask_choice(question, [read_text(row, OPTIONS[place]) for place in order])
    return Problem(
        id=f"{NAME}/{row.get('Record ID') or number}",
        task=NAME,
        domain=DOMAIN,
        messages=({"role": "user", "content": asked},),
        reference=f"{ANSWER_MARK} {LETTERS[order.index(0)]}",
        # The options' order is this task's own, so a copy would not have it.
        passage=question,
    )
