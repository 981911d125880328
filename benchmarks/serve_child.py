"""The engine of serve.py, called directly: JSON lines in, JSON lines out.

python benchmarks/serve_child.py MODEL PRECISION
"""

import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from ar2diff.cli.generate import load_engine
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request

Reply = dict[str, Any]


class Turn:
    """The requests of one turn, driven pass by pass: so many at a time, or each at its own moment."""

    def __init__(self, engine: Engine, asked: list[Reply], clients: int) -> None:
        self._engine, self._clients = engine, clients
        self._waiting = deque(enumerate(asked))
        self._answers: dict[int, Reply] = {}
        self._num_open = 0
        self._started_s = time.perf_counter()

    def run(self) -> Reply:
        """Times of every answer, in seconds since it was asked for."""
        longest_s = 0.0
        while self._waiting or self._num_open:
            self._admit()
            before_s = self._now()
            results = self._engine.scheduler.step()
            now = self._now()
            longest_s = max(longest_s, now - before_s)
            for key, step in results:
                self._note(key, step, now)
        answers = [self._answers[idx] for idx in sorted(self._answers)]
        return {"seconds": self._now(), "answers": answers, "longest_pass_s": longest_s}

    def _now(self) -> float:
        return time.perf_counter() - self._started_s

    def _admit(self) -> None:
        while self._waiting and self._is_due(self._waiting[0][1]):
            idx, asked = self._waiting.popleft()
            self._answers[idx] = {"asked_s": asked["at_s"] if not self._clients else self._now()}
            self._engine.scheduler.add(idx, self._build(asked))
            self._num_open += 1

    def _is_due(self, asked: Reply) -> bool:
        if self._clients:
            return self._num_open < self._clients
        if not self._num_open and (left_s := asked["at_s"] - self._now()) > 0:
            time.sleep(left_s)
        return asked["at_s"] <= self._now()

    def _build(self, asked: Reply) -> Request:
        return Request(
            prompt_ids=tuple(self._engine.loaded.tokenizer.encode(asked["prompt"])),
            max_tokens=asked["max_tokens"],
            logit_bias={int(idx): value for idx, value in asked["logit_bias"].items()},
            **asked["settings"],
        )

    def _note(self, key: Any, step: Any, now: float) -> None:
        if isinstance(step, Exception):
            raise step
        answer = self._answers[key]
        if step.text and "first_s" not in answer:
            answer["first_s"] = now - answer["asked_s"]
        if step.generation is not None:
            answer["end_s"] = now - answer["asked_s"]
            answer.setdefault("first_s", answer["end_s"])
            answer["tokens"] = len(step.generation.token_ids)
            self._num_open -= 1


def main() -> None:
    """Answer line by line."""
    engine = load_engine(Path(sys.argv[1]), sys.argv[2])  # type: ignore[arg-type]
    about = {"precision": engine.precision_reason, "end_ids": list(engine.loaded.tokenizer.eos_token_ids)}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps(Turn(engine, ask["asked"], ask["clients"]).run()), flush=True)


if __name__ == "__main__":
    main()
