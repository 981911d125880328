"""Thinking and calls of one answer, read again from the tokens that the engine gives back."""

from ar2diff.engine.generation import Generation, Pass
from ar2diff.serve.reading.reader import ReadingPlan
from ar2diff.serve.reading.values import Call


class StepReader:
    """What one choice has thought and called so far; its content is the engine's text.

    Args:
        plan: how the answer is read; None where all of it is content.
    """

    def __init__(self, plan: ReadingPlan | None) -> None:
        self._reader = None if plan is None else plan()
        self._num_shown, self._num_called = 0, 0

    @property
    def reasoning(self) -> str:
        """The thinking so far."""
        return "" if self._reader is None else self._reader.reasoning

    @property
    def calls(self) -> list[Call]:
        """The calls so far."""
        return [] if self._reader is None else self._reader.calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens that went into thinking so far."""
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def advance(self, step: Pass) -> tuple[str, list[tuple[int, Call]]]:
        """The thinking and the calls, with their numbers, that this step completed."""
        if self._reader is None:
            return "", []
        for token in step.settled:
            self._reader.push(token.token_id)
        if step.generation is not None:
            self._reader.flush()
        reasoning, calls = self.reasoning[self._num_shown :], list(enumerate(self.calls))[self._num_called :]
        self._num_shown, self._num_called = len(self.reasoning), len(self.calls)
        return reasoning, calls

    def read(self, generation: Generation) -> None:
        """Take in a whole answer."""
        if self._reader is not None:
            for token_id in generation.token_ids:
                self._reader.push(token_id)
            self._reader.flush()
