"""LiveCodeBench: competition programming (Jain et al. 2024, arXiv:2403.07974); scored by its public tests.

Columns read: `question_id`, `question_content`, `starter_code`, `public_test_cases`, `metadata`. The private tests
are a pickle in an archive, which is never opened: a score here is over the public tests alone, and higher than one
over all tests.
"""

import json
from collections.abc import Mapping
from typing import Any

from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import read_text

NAME = "livecodebench"
DOMAIN = "code"
VERSION = "2"


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
        tests=_read_cases(row),
    )


def _read_cases(row: Mapping[str, Any]) -> str:
    """The public tests in the form of `programs.passes_cases`; nothing where the row has none."""
    stored, about = row.get("public_test_cases"), row.get("metadata") or "{}"
    if not stored:
        return ""
    name = json.loads(about).get("func_name")
    cases = [
        {
            "input": case["input"],
            "output": case["output"],
            "function": name if case["testtype"] == "functional" else None,
        }
        for case in json.loads(stored)
    ]
    return json.dumps(cases) if cases else ""
