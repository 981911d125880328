"""Answers of an evaluation underway, so that one that was killed goes on where it stopped."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ar2diff.evals.scores import Answer
from ar2diff.hashing import sha256_bytes

LOG_NAME = "eval_answers.partial.jsonl"


class AnswerLog:
    """One line an answer, behind a line that says what they answer; a context manager.

    Args:
        about: models, settings and engine. A log of anything else is begun anew.

    Attributes:
        known: answers by mode and problem, those of an earlier, stopped evaluation too.
    """

    def __init__(self, run_dir: Path, about: Mapping[str, Any]) -> None:
        self._path = run_dir / LOG_NAME
        key = sha256_bytes(json.dumps(about, sort_keys=True, ensure_ascii=False).encode())
        self.known = _read(self._path, key)
        if not self.known:
            self._path.write_text(json.dumps({"about": key}) + "\n", encoding="utf-8")
        self._stream = self._path.open("a", encoding="utf-8")

    def __enter__(self) -> "AnswerLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stream.close()

    def add(self, answer: Answer) -> None:
        """Keep one answer."""
        self.known[answer.mode, answer.problem_id] = answer
        self._stream.write(json.dumps(answer.as_json(), ensure_ascii=False) + "\n")
        self._stream.flush()

    def finish(self) -> None:
        """The report is written: the log is not needed any more."""
        self._stream.close()
        self._path.unlink(missing_ok=True)


def _read(path: Path, key: str) -> dict[tuple[str, str], Answer]:
    if not path.is_file():
        return {}
    whole, _, cut = path.read_bytes().rpartition(b"\n")
    first, *lines = whole.split(b"\n")
    if first != json.dumps({"about": key}).encode():
        return {}
    if cut:  # a killed writer's last line
        path.write_bytes(whole + b"\n")
    answers = [Answer.from_json(json.loads(line)) for line in lines]
    return {(answer.mode, answer.problem_id): answer for answer in answers}
