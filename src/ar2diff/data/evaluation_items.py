"""The problems that a config evaluates on, and the blocklist that keeps them out of the data."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ar2diff.data.blocklist import BlocklistItem
from ar2diff.data.config import DataConfig, EvaluationShare
from ar2diff.data.decontaminate import Decontaminator
from ar2diff.data.documents import Document
from ar2diff.data.hashed_items import HASHES_SUFFIX, HashedItem, build_hashed_item, read_hashes
from ar2diff.data.locate import locate_files
from ar2diff.data.recipes.chat_jsonl import read_documents
from ar2diff.data.rows import read_rows, row_error
from ar2diff.errors import ConfigError
from ar2diff.tasks.problem import Problem, Task
from ar2diff.tasks.table import TASKS, find_task

# LiveCodeBench keeps the private tests of a problem in its row, which has tens of megabytes for some.
MAX_ITEM_BYTES = 256_000_000


def load_problems(share: EvaluationShare, fetched: Mapping[str, Path]) -> list[Problem]:
    """The held-out problems of a share: generated, or read from its source.

    Args:
        fetched: the folder of each downloaded source, by its text.

    Raises:
        ConfigError: an unknown task, a source for a generated task, or none for a stored one.
        DataError: a file is missing or broken, a row lacks the benchmark's columns, or two rows are the same problem.
    """
    task = find_task(share.task)
    if task.read_problem is None:
        if share.source:
            raise ConfigError("this task generates its problems", given=share.task, fix="Leave its source out")
        return task.build_problems(split="eval", count=share.count, start=share.start)
    if not share.source:
        fix = f"Write {share.task}?source=local:<file>, or a source that was fetched"
        raise ConfigError("the rows of this benchmark lie in a file", given=share.task, fix=fix)
    return _read_problems(share, task, locate_files(share.source, fetched))


def _read_problems(share: EvaluationShare, task: Task, files: list[Path]) -> list[Problem]:
    assert task.read_problem is not None
    problems: dict[str, Problem] = {}
    number = 0
    for path in files:
        for row in read_rows(path, max_row_bytes=MAX_ITEM_BYTES):
            number += 1
            if len(problems) == share.count:
                return list(problems.values())
            if number <= share.start:
                continue
            try:
                problem = task.read_problem(row.content, number)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"not a row of {task.name}: {_explain(error)}"
                raise row_error(path, row.number, reason, "Check the source of this benchmark") from None
            if problem.id in problems:
                raise row_error(path, row.number, f"a second problem {problem.id}", "Leave one of the two out")
            problems[problem.id] = problem
    return list(problems.values())


def _explain(error: Exception) -> str:
    return f"no column {error}" if isinstance(error, KeyError) else str(error)


def hash_items(share: EvaluationShare, fetched: Mapping[str, Path]) -> list[HashedItem]:
    """The items of a benchmark as hashes, whether or not its text may be published.

    Raises: as `load_problems`.
    """
    procedural = find_task(share.task).procedural
    items = (BlocklistItem.from_problem(problem, procedural=procedural) for problem in load_problems(share, fetched))
    return [hashed for item in items if (hashed := build_hashed_item(item))]


def hash_file(path: Path) -> list[HashedItem]:
    """The rows of a chat file as hashes, under the file's name.

    Raises:
        DataError: the file is broken.
    """
    items = (BlocklistItem.from_document(row, path.name) for row in _read_documents(path))
    return [hashed for item in items if (hashed := build_hashed_item(item))]


def _read_documents(path: Path) -> Iterator[Document]:
    return (row for row in read_documents(path, path.name) if isinstance(row, Document))


def build_blocklist(config: DataConfig, problems: Sequence[Sequence[Problem]]) -> Decontaminator:
    """The decontaminator of a config's evaluation problems and blocklist files.

    Args:
        problems: of each share of `config.evaluation`, as `load_problems` gives them.
    """
    items: list[BlocklistItem] = []
    hashed: list[HashedItem] = []
    for share, held_out in zip(config.evaluation, problems, strict=True):
        task = find_task(share.task)
        items += [
            BlocklistItem.from_problem(problem, procedural=task.procedural, hash_only=task.hash_only)
            for problem in held_out
        ]
    for name in config.blocklist_files:
        path = Path(name)
        if path.name.endswith(HASHES_SUFFIX):
            hashed += read_hashes(path)
            continue
        items += [BlocklistItem.from_document(row, path.name) for row in _read_documents(path)]
    templates = [text for task in TASKS.values() for text in task.template_texts()]
    return Decontaminator(items, template_texts=templates, hashed=hashed)
