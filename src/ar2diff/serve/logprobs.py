"""Log probabilities of tokens as the two routes show them. Free of torch."""

import codecs
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ar2diff.engine.generation import Generation, Pass, TokenLogprob
from ar2diff.tokenizer import Tokenizer

# What stands for log p of an id that is never emitted, as in the public API: JSON has no infinity.
LOWEST = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A token with its log p (None where nothing comes before it) and the likeliest tokens in its place."""

    token_id: int
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


def scores_of_pass(step: Pass) -> list[Scored]:
    """The tokens that became final in one step."""
    return [Scored(token_id=r.token_id, logprob=r.logprob, top=r.top) for r in step.settled]


def scores_of_answer(generation: Generation) -> list[Scored]:
    """The tokens of an answer."""
    return list(_zip_scores(generation.token_ids, generation.logprobs, generation.top_logprobs))


def scores_of_prompt(prompt_ids: Iterable[int], generation: Generation) -> list[Scored]:
    """The tokens of a prompt whose log probabilities were asked for."""
    return list(_zip_scores(prompt_ids, generation.prompt_logprobs, generation.prompt_top_logprobs))


def describe_chat(tokenizer: Tokenizer, scores: Iterable[Scored]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = [
        {
            **_describe_token(tokenizer, score.token_id, score.logprob),
            "top_logprobs": [_describe_token(tokenizer, idx, logprob) for idx, logprob in score.top],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of one completion choice, in pieces: offsets count the characters of what came before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def describe(self, scores: Iterable[Scored]) -> dict[str, Any]:
        """The next tokens; the token itself is among its likeliest, as in the public API."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for score in scores:
            found["tokens"].append(self._name(score.token_id))
            found["token_logprobs"].append(_finite(score.logprob))
            found["top_logprobs"].append(self._describe_top(score))
            found["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(score.token_id)))
        return found

    def _describe_top(self, score: Scored) -> dict[str, float | None] | None:
        if score.logprob is None:
            return None
        top = {self._name(idx): _finite(logprob) for idx, logprob in score.top}
        top.setdefault(self._name(score.token_id), _finite(score.logprob))
        return top

    def _name(self, token_id: int) -> str:
        # Parts of characters keep their bytes, so that no two of them are one key.
        content = self._tokenizer.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _zip_scores(
    ids: Iterable[int], logprobs: Iterable[float | None], tops: tuple[tuple[TokenLogprob, ...], ...]
) -> Iterator[Scored]:
    for idx, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        yield Scored(token_id=token_id, logprob=logprob, top=tops[idx] if tops else ())


def _describe_token(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    content = tokenizer.token_bytes(token_id)
    return {"token": content.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(content)}


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) else LOWEST
