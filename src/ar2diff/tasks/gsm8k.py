"""GSM8K test: grade-school word problems, scored by the final number (Cobbe et al. 2021, arXiv:2110.14168).

Columns: `question`, `answer` (worked, with `<<48/2=24>>` marks, ending in `#### 72`).
"""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import ANSWER_MARK, find_final, read_text

NAME = "gsm8k"
DOMAIN = "math"
VERSION = "2"
ASK = f"Finish with a line `{ANSWER_MARK}` and the number."
MARK = re.compile(r"<<[^<>]*>>")
# A minus after a digit is a hyphen: "10-12" ends in 12.
NUMBER = re.compile(r"(?:(?<!\d)-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
# Other ways to write the comma between thousands: LaTeX's, and blanks that do not break.
COMMA = re.compile(r"(?<=\d)(?:\{,\}|\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")


def read_problem(row: Mapping[str, Any], number: int) -> Problem:
    """The problem of a row; its reference is the worked answer without the calculator's marks."""
    question, answer = read_text(row, "question"), read_text(row, "answer")
    steps, found, final = answer.rpartition("####")
    if not found or read_number(final) is None:
        raise ValueError("the answer does not end in #### and a number")
    worked = MARK.sub("", steps).strip()
    return Problem(
        id=f"{NAME}/test/{number}",
        task=NAME,
        domain=DOMAIN,
        messages=({"role": "user", "content": f"{question}\n{ASK}"},),
        reference=f"{worked}\n{ANSWER_MARK} {final.strip()}",
        passage=question,
    )


def score(problem: Problem, answer_text: str) -> bool:
    """True where the last number, after `Answer:` where that is written, has the reference's value."""
    given = read_number(find_final(answer_text) if ANSWER_MARK in answer_text else answer_text)
    return given is not None and given == read_number(find_final(problem.reference))


def read_number(text: str) -> Decimal | None:
    """The value of the last number in `text`, thousands separators accepted; None where there is none."""
    found = NUMBER.findall(COMMA.sub(",", text.replace("\u2212", "-")))
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None
