"""The JSON of answers, whole and in pieces, as the public client reads it."""

from dataclasses import dataclass
from typing import Any, Literal

from ar2diff.engine.generation import Generation, Pass
from ar2diff.serve.logprobs import (
    CompletionLogprobs,
    Scored,
    describe_chat,
    scores_of_answer,
    scores_of_pass,
    scores_of_prompt,
)
from ar2diff.serve.trace import Trace
from ar2diff.tokenizer import Tokenizer

Route = Literal["chat", "completion"]
_OBJECTS = {
    "chat": ("chat.completion", "chat.completion.chunk"),
    "completion": ("text_completion", "text_completion"),
}
_PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every piece of one answer repeats; the tokenizer gives a trace its texts."""

    route: Route
    request_id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    prompts: tuple[tuple[int, ...], ...]
    choices_per_prompt: int
    has_logprobs: bool
    is_echoed: bool

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._choice(idx, generation) for idx, generation in enumerate(generations)]
        diffusion = _count_passes(generations)
        return {**self._head(0), "choices": choices, "usage": self.usage(generations), "diffusion": diffusion}

    def role(self, idx: int) -> dict[str, Any]:
        """The first piece of a chat choice."""
        return self._piece({"index": idx, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def text(self, idx: int, step: Pass, trace: Trace | None, offsets: CompletionLogprobs) -> dict[str, Any]:
        """A piece with settled text and its log probabilities; with a trace, the pass that settled it."""
        choice: dict[str, Any] = {"index": idx, "logprobs": None}
        if self.route == "chat":
            choice["delta"] = {"content": step.text} if step.text else {}
        else:
            choice["text"] = step.text
        if self.has_logprobs:
            scores = scores_of_pass(step)
            is_chat = self.route == "chat"
            choice["logprobs"] = describe_chat(self.tokenizer, scores) if is_chat else offsets.describe(scores)
        traced = {} if trace is None else {"diffusion": {"pass": trace.describe(step)}}
        return self._piece({**choice, "finish_reason": None, **traced})

    def final(self, idx: int, generation: Generation, *, trace: bool) -> dict[str, Any]:
        """The last piece of a choice; its passes are out already."""
        content: dict[str, Any] = {"delta": {}} if self.route == "chat" else {"text": "", "logprobs": None}
        spent = {"diffusion": describe_cost(generation) | (_describe_times(generation) if trace else {})}
        return self._piece({"index": idx, **content, "finish_reason": generation.finish_reason, **spent})

    def usage_piece(self, generations: list[Generation]) -> dict[str, Any]:
        """The piece that closes a stream whose usage was asked for."""
        return {**self._head(1), "choices": [], "usage": self.usage(generations)}

    def usage(self, generations: list[Generation]) -> dict[str, Any]:
        """Real tokens: each prompt once, every token of every choice."""
        prompt = sum(map(len, self.prompts[:: self.choices_per_prompt]))
        answer = sum(len(generation.token_ids) for generation in generations)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def _piece(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(1), "choices": [choice]}

    def _choice(self, idx: int, generation: Generation) -> dict[str, Any]:
        echo = self.tokenizer.decode(list(self.prompts[idx])) if self.is_echoed else ""
        content: dict[str, Any] = {"text": echo + generation.text}
        if self.route == "chat":
            content = {"message": {"role": "assistant", "content": generation.text, "refusal": None}}
        logprobs = self._logprobs(idx, generation) if self.has_logprobs else None
        ended = {"logprobs": logprobs, "finish_reason": generation.finish_reason}
        cost = describe_cost(generation)
        if generation.passes:
            trace = Trace(self.tokenizer)
            cost |= _describe_times(generation) | {"passes": [trace.describe(step) for step in generation.passes]}
        return {"index": idx, **content, **ended, "diffusion": cost}

    def _logprobs(self, idx: int, generation: Generation) -> dict[str, Any]:
        scores = scores_of_answer(generation)
        if self.route == "chat":
            return describe_chat(self.tokenizer, scores)
        if self.is_echoed:
            scores = scores_of_prompt(self.prompts[idx], generation) + scores
            if generation.finish_reason == "stop" and not generation.token_ids:
                # Clients that score a prompt with one token of answer drop the last entry: an end of turn is one.
                scores.append(Scored(token_id=self.tokenizer.eos_token_ids[0], logprob=None))
        return CompletionLogprobs(self.tokenizer).describe(scores)

    def _head(self, form: int) -> dict[str, Any]:
        return {
            "id": _PREFIXES[self.route] + self.request_id,
            "object": _OBJECTS[self.route][form],
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def describe_cost(generation: Generation) -> dict[str, Any]:
    """What a choice took."""
    cost = {**_count_passes([generation]), "passes_per_block": list(generation.passes_per_block)}
    if generation.drafted_by_offset:
        cost["drafted_by_offset"] = list(generation.drafted_by_offset)
        cost["accepted_by_offset"] = list(generation.accepted_by_offset)
    return cost


def _describe_times(generation: Generation) -> dict[str, float]:
    # With a trace only: without one, equal requests have equal answers.
    return {"prefill_s": generation.prefill_s, "decode_s": generation.decode_s}


def _count_passes(generations: list[Generation]) -> dict[str, Any]:
    forwards = sum(generation.num_forward_passes for generation in generations)
    tokens = sum(len(generation.token_ids) for generation in generations)
    return {
        "num_forward_passes": forwards,
        "num_prefill_passes": sum(generation.num_prefill_passes for generation in generations),
        "tokens_per_forward": tokens / forwards if forwards else 0.0,
    }
