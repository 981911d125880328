"""HumanEval: Python functions to complete (Chen et al. 2021, arXiv:2107.03374); scored in the sandbox.

Columns: `task_id`, `prompt`, `canonical_solution`, `test`, `entry_point`.
"""

from collections.abc import Mapping
from typing import Any

from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import read_text

NAME = "humaneval"
DOMAIN = "code"
VERSION = "2"


def read_problem(row: Mapping[str, Any], number: int) -> Problem:  # noqa: ARG001
    """The problem of a row; its reference is the function's published body."""
    prompt, body = read_text(row, "prompt"), str(row["canonical_solution"])
    content = f"Complete this Python function. Write the whole function.\n\n```python\n{prompt}\n```"
    return Problem(
        id=f"{NAME}/test/{read_text(row, 'task_id').rpartition('/')[2]}",
        task=NAME,
        domain=DOMAIN,
        messages=({"role": "user", "content": content},),
        reference=body,
        passage=prompt,
        tests=f"{read_text(row, 'test')}\n\ncheck({read_text(row, 'entry_point')})",
    )
