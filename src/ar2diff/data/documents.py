"""A training document and a dropped row: what every recipe yields."""

from dataclasses import dataclass

from ar2diff.tokenizer import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A prompt and the response to learn.

    Args:
        id: unique in its source.
        prompt: the turns before the response.
        response: what the model learns to write.
        source: the source's text and the row, such as `local:chat.jsonl#12`.
        task: the generating task of a procedural document, else empty.
        passage: as `Problem.passage`; empty where the whole prompt is the document's own.
    """

    id: str
    prompt: tuple[Message, ...]
    response: str
    source: str
    task: str = ""
    passage: str = ""

    @property
    def prompt_text(self) -> str:
        """All turns' contents, one paragraph each."""
        return "\n".join(message["content"] for message in self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedRow:
    """A row that becomes no document, and why; `reason` is a short fixed phrase, so that reasons can be counted."""

    id: str
    source: str
    reason: str
