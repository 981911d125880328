"""Documents with their normalised texts, so that each text is split into words once for all checks."""

from collections.abc import Sequence

from ar2diff.data.documents import Document
from ar2diff.data.normalize import normalize_text, read_signs


class TextBatch:
    """Attributes: `documents`, and `prompts` and `responses` as `normalize_text` gives them."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = list(documents)
        self.prompts = [normalize_text(document.prompt_text) for document in self.documents]
        self.responses = [normalize_text(document.response) for document in self.documents]

    def __len__(self) -> int:
        return len(self.documents)

    def read_asked(self, index: int) -> str:
        """What two documents with the same prompt have in common: the words, and the signs between them."""
        return f"{self.prompts[index]}\n{read_signs(self.documents[index].prompt_text)}"

    def read_compared(self) -> list[str]:
        """What near-duplicate search compares: the words without system turns, nothing of generated documents.

        A generator's wording is in all of its documents by nature, so they are compared by exact prompt alone.
        """
        return [self._join(index) for index in range(len(self))]

    def _join(self, index: int) -> str:
        document, prompt = self.documents[index], self.prompts[index]
        if document.task:
            return ""
        if any(message["role"] == "system" for message in document.prompt):
            turns = [message["content"] for message in document.prompt if message["role"] != "system"]
            prompt = normalize_text("\n".join(turns))
        return " ".join(text for text in (prompt, self.responses[index]) if text)
