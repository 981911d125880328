"""From token ids to text as it grows: whole characters only, cut at the first complete stop text. Free of torch."""

from typing import Protocol

from ar2diff.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"


class AnswerReader(Protocol):
    """What reads the text of an answer off its tokens: `TextStream`, or one that keeps a part of them to itself."""

    @property
    def is_done(self) -> bool:
        """Whether the answer ends here, whatever the model would add."""
        ...

    def push(self, token_id: int) -> str:
        """The text that this id completes, or nothing."""
        ...

    def flush(self) -> str:
        """What is still held back, once no more ids come."""
        ...


class TextStream:
    """Decodes ids one at a time; holds back the bytes of an unfinished character.

    Args:
        skip_special: leave the texts of control tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []
        self._shown = 0  # ids whose text is out
        self._start = 0  # ids before this one no longer matter to decoding

    @property
    def is_done(self) -> bool:
        """Never: text has no end of its own."""
        return False

    def push(self, token_id: int) -> str:
        """The text that this id completes, or nothing."""
        self._ids.append(token_id)
        text = self._pending()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        """What is still held back; an unfinished character shows as U+FFFD."""
        text = self._pending()
        self._start = self._shown = len(self._ids)
        return text

    def fork(self) -> "TextStream":
        """A stream that goes on from here and leaves this one as it is."""
        other = TextStream(self._tokenizer, skip_special=self._skip_special)
        other._ids, other._shown = self._ids[self._start :], self._shown - self._start
        return other

    def _pending(self) -> str:
        # Some decoders treat a sequence's first token differently, so the last shown piece is decoded along.
        before = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


class StopScanner:
    """Passes text through until a stop text is complete; holds back what may become one.

    The first stop text to be complete wins, the longest of those that end together; how the text was cut into
    pieces makes no difference.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Text that is certain to belong to the answer."""
        assert not self.is_stopped
        out = ""
        for character in text:
            self._held += character
            found = next((stop for stop in self._stops if self._held.endswith(stop)), None)
            if found is not None:
                self.is_stopped = True
                kept = self._held if self._include else self._held[: -len(found)]
                self._held = ""
                return out + kept
            keep = self._open_len()
            out += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        text, self._held = self._held, ""
        return text

    def _open_len(self) -> int:
        # The longest end of the held text that begins some stop text.
        for length in range(len(self._held), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
