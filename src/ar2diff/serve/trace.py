"""The `diffusion.trace` extension: every pass of an answer with the texts of its tokens.

Texts are those that the answer itself is made of: a character split over tokens belongs to the token that completes
it, so that the texts of settled tokens, put together, are the settled text.
"""

from typing import Any

from ar2diff.engine.generation import Pass, Reveal
from ar2diff.engine.text import TextStream
from ar2diff.tokenizer import Tokenizer


class Trace:
    """Describes the passes of one choice, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._settled = TextStream(tokenizer)  # of all tokens before the block at hand
        self._block: tuple[int | None, ...] = ()
        self._start = 0

    def describe(self, step: Pass) -> dict[str, Any]:
        """One pass: the block as it stands (null is a mask) and what was revealed."""
        self._move_to(step)
        return {
            "block_idx": step.block_idx,
            "pass_idx": step.pass_idx,
            "start": step.start,
            "token_ids": list(step.token_ids),
            "token_texts": self._texts(),
            "reveals": [_describe_reveal(reveal) for reveal in step.reveals],
        }

    def _move_to(self, step: Pass) -> None:
        for token_id in self._block[: step.start - self._start]:
            assert token_id is not None  # a block is left once its tokens are settled
            self._settled.push(token_id)
        self._block, self._start = step.token_ids, step.start

    def _texts(self) -> list[str | None]:
        texts: list[str | None] = []
        stream: TextStream | None = self._settled.fork()
        for token_id in self._block:
            if token_id is None:
                texts.append(None)
                stream = None  # what follows a mask is read without knowing what is under it
            else:
                stream = stream or TextStream(self._tokenizer)
                texts.append(stream.push(token_id))
        return texts


def _describe_reveal(reveal: Reveal) -> dict[str, Any]:
    return {"position": reveal.position, "token_id": reveal.token_id, "logprob": reveal.logprob}
