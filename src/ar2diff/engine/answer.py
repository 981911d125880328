"""The settled part of an answer: tokens come in from left to right until it is finished. Free of torch."""

from typing import Protocol

from ar2diff.engine.generation import FinishReason, Reveal
from ar2diff.engine.request import Request
from ar2diff.engine.text import AnswerReader, StopScanner, TextStream
from ar2diff.tokenizer import Tokenizer


class Form(Protocol):
    """What an answer tells of its tokens: `engine/grammar.py: Automaton`."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        ...

    def advance(self, token_id: int) -> None:
        """Take in the next token."""
        ...


class Answer:
    """Ids and text of one answer.

    Attributes:
        limit: tokens at most: max_tokens, or what the context leaves.
        settled: the settled tokens.
        text: the settled text.
        finish_reason: None while more tokens are welcome.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, *, max_seq_len: int, form: Form | None = None) -> None:
        self.limit = min(request.max_tokens, max_seq_len - len(request.prompt_ids))
        self.settled: list[Reveal] = []
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._form = form
        self._eos_ids = frozenset(tokenizer.eos_token_ids)
        self._reader: AnswerReader = request.reader() if request.reader else TextStream(tokenizer)
        self._stops = StopScanner(request.stop, include=request.include_stop)

    @property
    def is_finished(self) -> bool:
        """Whether the answer has its finish reason."""
        return self.finish_reason is not None

    def is_end(self, token_id: int) -> bool:
        """Whether this id ends a turn."""
        return token_id in self._eos_ids

    def push(self, token: Reveal) -> str:
        """Settle the next token; returns the text that became final."""
        assert not self.is_finished
        if token.token_id in self._eos_ids:
            return self._finish("stop")
        self.settled.append(token)
        self.token_ids.append(token.token_id)
        if self._form is not None:
            self._form.advance(token.token_id)
        text = self._emit(self._stops.push(self._reader.push(token.token_id)))
        if self._stops.is_stopped:
            self.finish_reason = "stop"
        elif self._reader.is_done or (self._form is not None and self._form.is_complete):
            text += self._finish("stop")
        elif len(self.token_ids) == self.limit:
            text += self._finish("length")
        return text

    def finish_empty(self) -> None:
        """End an answer that may hold nothing."""
        assert self.limit == 0
        self.finish_reason = "length"

    def _finish(self, reason: FinishReason) -> str:
        # An unfinished character may still complete a stop text only as U+FFFD; it is scanned like any other.
        self.finish_reason = reason
        text = self._stops.push(self._reader.flush())
        if self._stops.is_stopped:
            self.finish_reason = "stop"
        return self._emit(text + self._stops.flush())

    def _emit(self, text: str) -> str:
        self.text += text
        return text
