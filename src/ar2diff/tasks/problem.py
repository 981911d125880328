"""One question with its right answer, and the functions that make and score such questions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from ar2diff.tokenizer import Message

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question as it is asked, and the reference answer.

    Args:
        id: unique over all tasks and splits, such as `structured/eval/17`.
        task: a name in `tasks.table.TASKS`.
        domain: what is reported together, such as `structured` or `math`; `math` also turns on
            decontamination with numbers masked.
        messages: the prompt.
        reference: the answer a training document has, or the one shown beside a wrong answer; empty where
            there is none.
        passage: the part of the prompt that is this problem's own, without the task's wording; empty where
            the whole prompt is.
        tests: of an answer that is a program: what `Task.score` runs it against.
    """

    id: str
    task: str
    domain: str
    messages: "tuple[Message, ...]"
    reference: str
    passage: str = ""
    tests: str = ""

    @property
    def prompt_text(self) -> str:
        """All messages' contents, one paragraph each."""
        return "\n".join(message["content"] for message in self.messages)


class BuildProblems(Protocol):
    """Builds the problems `start` to `start + count - 1` of a split; equal arguments give equal problems."""

    def __call__(self, *, split: Split, count: int, start: int = 0) -> list[Problem]:
        """The problems, in order of their index."""
        ...


def no_templates() -> tuple[str, ...]:
    """For tasks whose text is written by people: nothing is wording of a generator."""
    return ()


class ReadProblem(Protocol):
    """Turns one row of a benchmark's published file into a problem."""

    def __call__(self, row: Mapping[str, Any], number: int) -> Problem:
        """The problem of row `number`, counted from 1.

        Raises:
            KeyError, TypeError, ValueError: the row is none of this benchmark.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A benchmark: one row of `tasks.table.TASKS`.

    Args:
        version: changes whenever a problem's text, reference or score could.
        procedural: problems come from a generator, train and eval by disjoint seeds.
        score: whether a problem's answer is right; None where nothing is right or wrong.
        template_texts: the generator's own wording, which says nothing about a particular problem.
        libraries: packages whose version decides the problems.
        read_problem: for a benchmark whose problems are stored in a file; `build_problems` then only says so.
        hash_only: the owner asks that the text stay unpublished, so only hashes of it are ever written.
    """

    name: str
    version: str
    domain: str
    procedural: bool
    build_problems: BuildProblems
    score: Callable[[Problem, str], bool] | None
    template_texts: Callable[[], tuple[str, ...]] = no_templates
    libraries: tuple[str, ...] = ()
    read_problem: ReadProblem | None = None
    hash_only: bool = False
