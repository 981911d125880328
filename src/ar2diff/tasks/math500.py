"""MATH-500: competition mathematics (Hendrycks et al. 2021; the 500 problems of Lightman et al. 2023).

Columns: `problem`, `solution`, `answer`, `unique_id`. An answer counts where it is written like the reference, the
usual differences removed, or where math-verify finds the two equal, such as 0.5 and 1/2.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ar2diff.tasks.math_check import CHECKER
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import ANSWER_MARK, find_final, read_text

NAME = "math500"
DOMAIN = "math"
VERSION = "2"
ASK = r"Put the final answer in \boxed{}."
_FRACTION = re.compile(r"\\[dtc]?frac(?:\{(-?\d+)\}|(\d))(?:\{(-?\d+)\}|(\d))")
_STYLE = re.compile(
    r"\\(?:left|right|displaystyle|[,;:! ])|\\(?:text|mathrm|mbox)\{([^{}]*)\}|\\[$%]|[$%\s]|\^\{?\\circ\}?"
)
_BRACED_DIGIT = re.compile(r"([_^])\{(\w)\}")


def read_problem(row: Mapping[str, Any], number: int) -> Problem:
    """The problem of a row; its reference is the published solution."""
    question, solution, answer = (read_text(row, name) for name in ("problem", "solution", "answer"))
    return Problem(
        id=f"{NAME}/test/{row.get('unique_id') or number}",
        task=NAME,
        domain=DOMAIN,
        messages=({"role": "user", "content": f"{question}\n{ASK}"},),
        reference=f"{solution}\n{ANSWER_MARK} {' '.join(answer.split())}",
        passage=question,
    )


def score(problem: Problem, answer_text: str) -> bool:
    """True where the last boxed answer, or what follows the last `Answer:`, is the reference answer."""
    right, given = find_final(problem.reference), find_boxed(answer_text)
    if given is None:
        given = find_final(answer_text)
    return bool(given) and (is_same_answer(given, right) or CHECKER.is_equal(f"${right}$", f"${given}$"))


def find_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, its braces balanced; None where there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def is_same_answer(left: str, right: str) -> bool:
    """Whether two final answers are written alike, or are equal numbers."""
    left, right = normalize_answer(left), normalize_answer(right)
    if left == right:
        return True
    values = (_read_value(left), _read_value(right))
    return values[0] is not None and values[0] == values[1]


def normalize_answer(text: str) -> str:
    """The answer without dollar signs, spaces, units of degree and percent, fonts and sized brackets."""
    text = _FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text.strip().rstrip("."))
    text = _STYLE.sub(lambda m: m[1] or "", text)
    return _BRACED_DIGIT.sub(r"\1\2", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))


def _read_value(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
