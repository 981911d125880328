"""Keeps one of several documents that ask the same: the first one in the order of the sources."""

from hashlib import blake2b
from typing import Protocol

from ar2diff.data.documents import Document
from ar2diff.data.normalize import normalize_text


class Deduplicator(Protocol):
    """A rule that compares each document with those before it."""

    def find_earlier(self, document: Document) -> str | None:
        """The id of an earlier document that this one repeats, or None; the document is then remembered."""
        ...


class ExactPromptDeduplicator:
    """Two documents are the same where their normalised prompts are equal. 128 bits are kept of each prompt."""

    def __init__(self) -> None:
        self._first: dict[bytes, str] = {}

    def find_earlier(self, document: Document) -> str | None:
        """The id of the first document with this prompt, or None."""
        digest = blake2b(normalize_text(document.prompt_text).encode(), digest_size=16).digest()
        earlier = self._first.get(digest)
        if earlier is None:
            self._first[digest] = document.id
        return earlier
