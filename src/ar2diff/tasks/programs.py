"""Grading answers that are programs, in the sandbox: by a test program, or by inputs and expected outputs."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any

from ar2diff.errors import ConfigError
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.sandbox import Limits, Outcome, run_program

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
# What people who write such answers take for granted.
_PRELUDE = "from typing import *\nimport math, re, sys, collections, itertools, functools, heapq, bisect, string\n"
TEST_LIMITS = Limits(seconds=10.0)
CASE_LIMITS = Limits(seconds=6.0)


def find_program(answer_text: str) -> str:
    """The longest fenced block of an answer, or the whole answer where there is none."""
    found = _FENCED.findall(answer_text)
    return str(max(found, key=len)) if found else answer_text


def passes_tests(problem: Problem, answer_text: str) -> bool:
    """Whether the answer's program and then `problem.tests` run to their end.

    Raises:
        ConfigError: there is no sandbox on this machine.
    """
    # A word that the answer cannot know, printed after the last test: leaving early is not passing.
    word = secrets.token_hex(16)
    program = f"{_PRELUDE}\n{find_program(answer_text)}\n\n{problem.tests}\n\nprint({word!r})\n"
    outcome = run_program(program, limits=TEST_LIMITS)
    return _ended_well(outcome) and outcome.stdout.endswith(f"{word}\n")


def passes_cases(problem: Problem, answer_text: str) -> bool:
    """Whether the answer's program gives the expected output for each input of `problem.tests`.

    `problem.tests` is a JSON list of objects with input, output and, for a method to be called, its name.

    Raises:
        ConfigError: there is no sandbox on this machine, or the problem has no public tests.
    """
    if not problem.tests:
        raise ConfigError("the problem has no public tests", given=problem.id, fix="Score an edition that has")
    program = find_program(answer_text)
    return all(_passes_case(program, case) for case in json.loads(problem.tests))


def _passes_case(program: str, case: Mapping[str, Any]) -> bool:
    if (name := case.get("function")) is None:
        outcome = run_program(f"{_PRELUDE}\n{program}\n", stdin=case["input"], limits=CASE_LIMITS)
        return _ended_well(outcome) and is_same_output(outcome.stdout, case["output"])
    call = (
        f"{_PRELUDE}\n{program}\n"
        "import json as _json\n"
        f"_arguments = [_json.loads(line) for line in {case['input']!r}.splitlines() if line.strip()]\n"
        f"_call = getattr(Solution(), {name!r}) if 'Solution' in globals() else globals()[{name!r}]\n"
        "print()\nprint(_json.dumps(_call(*_arguments)))\n"
    )
    outcome = run_program(call, limits=CASE_LIMITS)
    lines = outcome.stdout.splitlines()
    if not _ended_well(outcome) or not lines:
        return False
    try:
        return bool(json.loads(lines[-1]) == json.loads(case["output"]))
    except ValueError:
        return False


def _ended_well(outcome: Outcome) -> bool:
    return outcome.why == "exit" and outcome.exit_code == 0


def is_same_output(given: str, wanted: str) -> bool:
    """Whether two outputs agree line by line: as text without outer blanks, or word by word as equal decimals."""
    pairs = zip_longest(given.strip().split("\n"), wanted.strip().split("\n"))
    return all(
        left is not None and right is not None and _is_same_line(left.strip(), right.strip()) for left, right in pairs
    )


def _is_same_line(left: str, right: str) -> bool:
    if left == right:
        return True
    numbers = (_read_decimals(left.split()), _read_decimals(right.split()))
    return numbers[0] is not None and numbers[0] == numbers[1]


def _read_decimals(words: Sequence[str]) -> list[Decimal] | None:
    try:
        return [Decimal(word) for word in words]
    except InvalidOperation:
        return None
