"""MBPP test: short Python programs from a sentence (Austin et al. 2021, arXiv:2108.07732), scored in the sandbox.

Columns: `task_id`, `text` (`prompt` in the sanitized edition), `code`, `test_list`.
"""

from collections.abc import Mapping
from typing import Any

from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import read_first, read_text

NAME = "mbpp"
DOMAIN = "code"
VERSION = "2"


def read_problem(row: Mapping[str, Any], number: int) -> Problem:  # noqa: ARG001
    """The problem of a row, asked with its tests, as the paper does."""
    text, tests = read_first(row, ("text", "prompt")), row["test_list"]
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError("the column 'test_list' holds no list of texts")
    listed = "\n".join(tests)
    content = f"Write a Python function: {text}\nYour code must pass these tests:\n\n{listed}"
    return Problem(
        id=f"{NAME}/test/{row['task_id']}",
        task=NAME,
        domain=DOMAIN,
        messages=({"role": "user", "content": content},),
        reference=read_text(row, "code"),
        passage=text,
        tests=f"{row.get('test_setup_code') or ''}\n{listed}",
    )
