"""Documents from the training split of a generating task: prompt and reference answer, as many as are wanted."""

from collections.abc import Iterator

from ar2diff.data.documents import Document
from ar2diff.errors import ConfigError
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.table import find_task

CHUNK = 256


def generate_documents(task_name: str, source: str, start: int = 0) -> Iterator[Document]:
    """Yield the documents of training problems `start`, `start + 1`, ... without end.

    Raises:
        ConfigError: there is no such task, or its problems are not generated.
    """
    task = find_task(task_name)
    if not task.procedural:
        raise ConfigError("this task has no training problems", given=task_name, fix="Use a generating task")
    while True:
        for problem in task.build_problems(split="train", count=CHUNK, start=start):
            yield _build_document(problem, source)
        start += CHUNK


def _build_document(problem: Problem, source: str) -> Document:
    return Document(
        id=problem.id,
        prompt=problem.messages,
        response=problem.reference,
        source=f"{source}#{problem.id}",
        task=problem.task,
        passage=problem.passage,
    )
