"""The evaluation items that training text must not contain, and what a match is."""

from dataclasses import dataclass
from typing import NamedTuple

from ar2diff.data.documents import Document
from ar2diff.tasks.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocklistItem:
    """One evaluation question.

    Args:
        benchmark: what removals are counted under: a task's name or a file's.
        is_math: numbers are also compared masked.
        procedural: made by a generator, so that its wording is not its own.
        passage: as `Problem.passage`.
    """

    id: str
    benchmark: str
    prompt: str
    reference: str = ""
    is_math: bool = False
    procedural: bool = False
    passage: str = ""

    @classmethod
    def from_problem(cls, problem: Problem, *, procedural: bool) -> "BlocklistItem":
        """The item of an evaluation problem."""
        return cls(
            id=problem.id,
            benchmark=problem.task,
            prompt=problem.prompt_text,
            reference=problem.reference,
            is_math=problem.domain == "math",
            procedural=procedural,
            passage=problem.passage,
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
