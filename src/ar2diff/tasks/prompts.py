"""Prompts without a right answer, asked for speed and acceptance by domain: nothing is graded.

Rows of two forms: MT-Bench's questions (Zheng et al. 2023, arXiv:2306.05685) with `question_id`, `category` and
`turns`, of which the first is asked and the category is the domain; or `prompt` and perhaps `domain`.
"""

from collections.abc import Mapping
from typing import Any

from ar2diff.hashing import sha256_bytes
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.stored import read_text

NAME = "prompts"
DOMAIN = "prompts"
VERSION = "1"
# What a report calls all domains together.
RESERVED = "all"
DIGEST_LEN = 16


def read_problem(row: Mapping[str, Any], number: int) -> Problem:  # noqa: ARG001
    """The problem of a row; it has no reference."""
    if "turns" in row:
        return _build(f"question/{_read_id(row)}", _read_domain(row, "category"), _read_turns(row)[0])
    if "prompt" not in row:
        raise ValueError("it has neither `turns` (with `question_id` and `category`) nor `prompt`")
    prompt = read_text(row, "prompt")
    domain = DOMAIN if row.get("domain") is None else _read_domain(row, "domain")
    # Row numbers would give two files the same ids.
    return _build(f"sha256/{sha256_bytes(prompt.encode())[:DIGEST_LEN]}", domain, prompt)


def _build(key: str, domain: str, prompt: str) -> Problem:
    return Problem(
        id=f"{NAME}/{key}",
        task=NAME,
        domain=domain,
        messages=({"role": "user", "content": prompt},),
        reference="",
        passage=prompt,
    )


def _read_id(row: Mapping[str, Any]) -> str:
    value = row["question_id"]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError("the column 'question_id' holds neither a whole number nor text")
    return value.strip()


def _read_domain(row: Mapping[str, Any], name: str) -> str:
    domain = read_text(row, name)
    if domain == RESERVED or not domain.isprintable():
        raise ValueError(f"the column {name!r} holds {domain!r}, which cannot name a domain")
    return domain


def _read_turns(row: Mapping[str, Any]) -> list[str]:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("the column 'turns' holds no list of texts")
    for place, turn in enumerate(turns, start=1):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"turn {place} of the column 'turns' holds no text")
    return [turn.strip() for turn in turns]
