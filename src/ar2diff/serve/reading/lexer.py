"""Text and markers off an answer's tokens: a marker counts by its id where it is a token, else by its text."""

from collections.abc import Iterable

from ar2diff.engine.text import TextStream
from ar2diff.tokenizer import Tokenizer

Lexeme = tuple[str, bool]
"""A piece of text, and whether it is a marker."""


class Lexer:
    """Cuts tokens into text and markers; holds back what may become a marker.

    Args:
        markers: texts that count as markers.
        kept: further control tokens whose text is kept; that of others is left out, as in plain answers.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str], kept: Iterable[str]) -> None:
        ids = {text: tokenizer.token_to_id(text) for text in markers}
        self._marker_of = {idx: text for text, idx in ids.items() if idx is not None}
        self._spelled = sorted((text for text, idx in ids.items() if idx is None), key=len, reverse=True)
        known = {tokenizer.token_to_id(text) for text in kept} | self._marker_of.keys()
        self._hidden = tokenizer.special_ids - known
        self._stream = TextStream(tokenizer, skip_special=False)
        self._held = ""

    def push(self, token_id: int) -> list[Lexeme]:
        """What this id completes."""
        if token_id in self._hidden:
            return []
        if token_id not in self._marker_of:
            return self._cut(self._stream.push(token_id))
        before = self.flush()
        self._stream.push(token_id)  # what follows is decoded as what follows it
        return [*before, (self._marker_of[token_id], True)]

    def flush(self) -> list[Lexeme]:
        """What is held back."""
        found = self._cut(self._stream.flush())
        held, self._held = self._held, ""
        return [*found, (held, False)] if held else found

    def _cut(self, text: str) -> list[Lexeme]:
        self._held += text
        found: list[Lexeme] = []
        while hits := [(at, mark) for mark in self._spelled if (at := self._held.find(mark)) >= 0]:
            at, mark = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            found += [(self._held[:at], False), (mark, True)]
            self._held = self._held[at + len(mark) :]
        keep = self._open_len()
        found.append((self._held[: len(self._held) - keep], False))
        self._held = self._held[len(self._held) - keep :]
        return [lexeme for lexeme in found if lexeme[0]]

    def _open_len(self) -> int:
        # The longest end of the held text that begins some marker.
        longest = min(len(self._held), max(map(len, self._spelled), default=1) - 1)
        return next(
            (n for n in range(longest, 0, -1) if any(m.startswith(self._held[-n:]) for m in self._spelled)), 0
        )
