"""The evaluation items that training text must not contain, and what a match is."""

from dataclasses import dataclass
from typing import NamedTuple

from ar2diff.data.documents import Document
from ar2diff.tasks.problem import Problem

# Of these, a copy with other numbers is still a copy.
NUMERIC_DOMAINS = ("math", "science")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocklistItem:
    """One evaluation question.

    Args:
        benchmark: what removals are counted under: a task's name or a file's.
        is_math: numbers are also compared masked.
        procedural: made by a generator, so that its wording is not its own.
        passage: as `Problem.passage`.
        hash_only: its text is never written anywhere.
    """

    id: str
    benchmark: str
    prompt: str
    reference: str = ""
    is_math: bool = False
    procedural: bool = False
    passage: str = ""
    hash_only: bool = False

    @classmethod
    def from_problem(cls, problem: Problem, *, procedural: bool, hash_only: bool = False) -> "BlocklistItem":
        """The item of an evaluation problem."""
        return cls(
            id=problem.id,
            benchmark=problem.task,
            prompt=problem.prompt_text if procedural else problem.passage or problem.prompt_text,
            reference=problem.reference,
            is_math=problem.domain in NUMERIC_DOMAINS,
            procedural=procedural,
            passage=problem.passage,
            hash_only=hash_only,
        )

    @classmethod
    def from_document(cls, document: Document, benchmark: str) -> "BlocklistItem":
        """The item of a row of a blocklist file; nothing is known of its subject, so numbers are compared masked."""
        return cls(
            id=document.id,
            benchmark=benchmark,
            prompt=document.prompt_text,
            reference=document.response,
            is_math=True,
        )


class Match(NamedTuple):
    """Why a document is removed: the item, the rule, and the text that both have."""

    item_id: str
    benchmark: str
    policy: str
    rule: str
    gram: str
