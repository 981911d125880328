"""A document as token ids: the chat prompt, the response, and one end-of-turn token."""

from collections.abc import Sequence
from typing import NamedTuple

from ar2diff.data.documents import Document
from ar2diff.tokenizer import Tokenizer


class TokenizedDocument(NamedTuple):
    """All ids of a document; the first `prompt_len` of them are the prompt."""

    token_ids: list[int]
    prompt_len: int


def tokenize_document(document: Document, tokenizer: Tokenizer) -> TokenizedDocument:
    """The ids that a chat with this prompt and response has; text never becomes a control token.

    Raises:
        RequestError: the tokenizer has no chat template, or it refuses the prompt.
    """
    prompt_ids = tokenizer.encode_chat(document.prompt, add_generation_prompt=True)
    response_ids = tokenizer.encode(document.response)
    return TokenizedDocument([*prompt_ids, *response_ids, tokenizer.eos_token_ids[0]], len(prompt_ids))


def tokenize_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[TokenizedDocument]:
    """`tokenize_document` of each, on all cores."""
    prompts = tokenizer.encode_chats([document.prompt for document in documents], add_generation_prompt=True)
    responses = tokenizer.encode_many([document.response for document in documents])
    end = tokenizer.eos_token_ids[0]
    return [
        TokenizedDocument([*prompt, *response, end], len(prompt))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
