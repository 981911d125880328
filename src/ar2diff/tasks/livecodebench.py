"""LiveCodeBench: competition programming (Jain et al. 2024, arXiv:2403.07974); its question text alone, not run here.

Columns read: `question_id`, `question_content`, `starter_code`. The archived private tests are never opened.
"""

from collections.abc import Mapping
from typing import Any

from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import read_text

NAME = "livecodebench"
DOMAIN = "code"
VERSION = "1"


def read_problem(row: Mapping[str, Any], number: int) -> Problem:  # noqa: ARG001
    """The problem of a row; no reference is published."""
    question, starter = read_text(row, "question_content"), str(row.get("starter_code") or "").rstrip()
    begin = f"\n\nBegin with this code:\n```python\n{starter}\n```" if starter else ""
    return Problem(
        id=f"{NAME}/{row['question_id']}",
        task=NAME,
        domain=DOMAIN,
        messages=({"role": "user", "content": f"Solve this problem in Python.\n\n{question}{begin}"},),
        reference="",
        passage=question,
    )
