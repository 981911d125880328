"""The state machine that parts an answer into content, thinking and calls, token by token.

What the engine takes for the answer's text is the content: stop texts count there only.
"""

from dataclasses import dataclass

from ar2diff.serve.reading.formats import Format
from ar2diff.serve.reading.lexer import Lexer
from ar2diff.serve.reading.values import Call, Tools, Unfinished
from ar2diff.tokenizer import Tokenizer

_SEPARATORS = " \n\t;"  # what parts calls without marks
THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """How an answer is read; called, it gives a reader for one answer.

    Attributes:
        thinks: whether the model may think.
        is_open: whether the prompt has opened the thinking already.
        format: in which calls are written, or None where none are looked for.
        tools: what may be called.
        is_single: whether the answer ends with its first call.
    """

    tokenizer: Tokenizer
    thinks: bool = False
    is_open: bool = False
    format: Format | None = None
    tools: Tools
    is_single: bool = False

    def __call__(self) -> "Reader":
        """A reader at the start of an answer."""
        return Reader(self)


class Reader:
    """Reads one answer; an `AnswerReader` of the engine.

    Attributes:
        is_done: whether the answer is complete.
        reasoning: the thinking so far.
        calls: the calls so far.
        num_reasoning_tokens: tokens that went into thinking, its markers among them.
    """

    def __init__(self, plan: ReadingPlan) -> None:
        self._plan, self._format = plan, plan.format
        self.is_done, self.reasoning, self.calls = False, "", list[Call]()
        self.num_reasoning_tokens = 0
        self._is_thinking = plan.is_open
        markers, kept = [THINK, THINK_END] if plan.thinks else [], list[str]()
        if self._format is not None:
            markers += [self._format.begin, *([self._format.end] if self._format.end else [])]
            kept += self._format.inner
        self._lexer = Lexer(plan.tokenizer, markers, kept)
        self._block: str | None = None  # a call that is not complete yet
        self._space = ""  # white space that counts only before more text
        self._is_fresh = True  # no content since the start, a thought or a call
        self._has_content = False

    def push(self, token_id: int) -> str:
        """The content that this id completes."""
        was_thinking = self._is_thinking
        content = "".join(self._take(*lexeme) for lexeme in self._lexer.push(token_id) if not self.is_done)
        self.num_reasoning_tokens += was_thinking or self._is_thinking
        return content

    def flush(self) -> str:
        """The content that was held back; a call that is not complete is content."""
        content = "".join(self._take(*lexeme) for lexeme in self._lexer.flush() if not self.is_done)
        block, self._block = self._block, None
        if block is not None:
            content += self._write(block)
        is_kept = not self._is_fresh or not (self.reasoning or self.calls or self.num_reasoning_tokens)
        space, self._space = self._space, ""
        return content + (space if is_kept else "")

    def _take(self, text: str, is_marker: bool) -> str:
        if self._block is not None or (not self._is_thinking and self._is_bare_start(text)):
            return self._take_call(text, is_marker)
        if is_marker and text in (THINK, THINK_END):
            self._turn(text == THINK)
        elif self._is_thinking:
            self._think(text)
        elif self._format is not None and is_marker and text == self._format.begin:
            self._block = text
        else:
            return self._write(text)
        return ""

    def _turn(self, is_thinking: bool) -> None:
        if is_thinking != self._is_thinking:
            self._is_thinking, self._is_fresh, self._space = is_thinking, True, ""

    def _think(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self.reasoning += kept if self.reasoning else kept.lstrip("\n")

    def _is_bare_start(self, text: str) -> bool:
        """Whether a call without a mark begins here: only where no content stands before it."""
        if self._format is None or self._format.end is not None or self._has_content:
            return False
        bare = (self._space + text).lstrip(_SEPARATORS if self.calls else None)
        return bare.startswith("{")

    def _take_call(self, text: str, is_marker: bool) -> str:
        assert self._format is not None
        self._block = (self._block or "") + text
        is_end = is_marker and text == self._format.end if self._format.end else "}" in text
        if not is_end:
            return ""
        try:
            call, rest = self._format.parse(self._block.strip(_SEPARATORS), self._plan.tools)
        except Unfinished:
            return ""
        except ValueError:
            block, self._block = self._block, None
            return self._write(block)
        self.calls.append(call)
        self._block, self._space, self._is_fresh = None, "", True
        self.is_done = self._plan.is_single
        return self._take(rest, is_marker=False) if rest and not self.is_done else ""

    def _write(self, text: str) -> str:
        """Content, but for white space at its end while something may follow that it does not belong to."""
        text = self._space + text
        if self._is_fresh and (self.reasoning or self.calls or self.num_reasoning_tokens):
            text = text.lstrip("\n")
        kept = text.rstrip() if self._format is not None or self._is_fresh else text
        if self.calls and self._is_fresh and self._format is not None and self._format.end is None:
            kept = kept.rstrip(_SEPARATORS)
        self._space = text[len(kept) :]
        if kept:
            self._is_fresh, self._has_content = False, True
        return kept
