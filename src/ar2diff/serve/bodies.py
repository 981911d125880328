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
from ar2diff.serve.reading.reader import ReadingPlan
from ar2diff.serve.reading.steps import StepReader
from ar2diff.serve.reading.values import Call
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
    plan: ReadingPlan | None = None

    def whole(self, generations: list[Generation]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self._choice(idx, generation) for idx, generation in enumerate(generations)]
        diffusion = _count_passes(generations)
        return {**self._head(0), "choices": choices, "usage": self.usage(generations), "diffusion": diffusion}

    def role(self, idx: int) -> dict[str, Any]:
        """The first piece of a chat choice."""
        return self._piece({"index": idx, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def text(
        self, idx: int, step: Pass, trace: Trace | None, offsets: CompletionLogprobs, reasoning: str
    ) -> dict[str, Any]:
        """A piece with settled text, thinking and log probabilities; with a trace, the pass that settled it."""
        choice: dict[str, Any] = {"index": idx, "logprobs": None}
        if self.route == "chat":
            thought = {"reasoning_content": reasoning} if reasoning else {}
            choice["delta"] = thought | ({"content": step.text} if step.text else {})
        else:
            choice["text"] = step.text
        if self.has_logprobs:
            scores = scores_of_pass(step)
            is_chat = self.route == "chat"
            choice["logprobs"] = describe_chat(self.tokenizer, scores) if is_chat else offsets.describe(scores)
        traced = {} if trace is None else {"diffusion": {"pass": trace.describe(step)}}
        return self._piece({**choice, "finish_reason": None, **traced})

    def call(self, idx: int, call_idx: int, call: Call) -> list[dict[str, Any]]:
        """The pieces of one call: its name, then its arguments."""
        whole = self._describe_call(idx, call_idx, call)
        named = {**whole, "function": {"name": call.name, "arguments": ""}}
        rest = {"function": {"arguments": call.arguments}}
        deltas = [{"tool_calls": [{"index": call_idx, **part}]} for part in (named, rest)]
        return [self._piece({"index": idx, "delta": delta, "finish_reason": None}) for delta in deltas]

    def final(self, idx: int, generation: Generation, *, trace: bool) -> dict[str, Any]:
        """The last piece of a choice; its passes are out already."""
        content: dict[str, Any] = {"delta": {}} if self.route == "chat" else {"text": "", "logprobs": None}
        spent = {"diffusion": describe_cost(generation) | (_describe_times(generation) if trace else {})}
        reason = _name_reason(generation, self._read(generation))
        return self._piece({"index": idx, **content, "finish_reason": reason, **spent})

    def usage_piece(self, generations: list[Generation]) -> dict[str, Any]:
        """The piece that closes a stream whose usage was asked for."""
        return {**self._head(1), "choices": [], "usage": self.usage(generations)}

    def usage(self, generations: list[Generation]) -> dict[str, Any]:
        """Real tokens: each prompt once, every token of every choice."""
        prompt = sum(map(len, self.prompts[:: self.choices_per_prompt]))
        answer = sum(len(generation.token_ids) for generation in generations)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }
        if self.route == "chat":
            thinking = sum(self._read(generation).num_reasoning_tokens for generation in generations)
            counts["completion_tokens_details"] = {"reasoning_tokens": thinking}
        return counts

    def _read(self, generation: Generation) -> StepReader:
        reading = StepReader(self.plan)
        reading.read(generation)
        return reading

    def _message(self, idx: int, generation: Generation, reading: StepReader) -> dict[str, Any]:
        calls = [self._describe_call(idx, call_idx, call) for call_idx, call in enumerate(reading.calls)]
        content = None if calls and not generation.text else generation.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reading.reasoning:
            message["reasoning_content"] = reading.reasoning
        return message | ({"tool_calls": calls} if calls else {})

    def _describe_call(self, idx: int, call_idx: int, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self.request_id}_{idx}_{call_idx}", "type": "function", "function": function}

    def _piece(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(1), "choices": [choice]}

    def _choice(self, idx: int, generation: Generation) -> dict[str, Any]:
        echo = self.tokenizer.decode(list(self.prompts[idx])) if self.is_echoed else ""
        content: dict[str, Any] = {"text": echo + generation.text}
        reading = self._read(generation)
        if self.route == "chat":
            content = {"message": self._message(idx, generation, reading)}
        logprobs = self._logprobs(idx, generation) if self.has_logprobs else None
        ended = {"logprobs": logprobs, "finish_reason": _name_reason(generation, reading)}
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


def _name_reason(generation: Generation, reading: StepReader) -> str:
    # A call that max_tokens ended is content, so a client must hear of it, calls before it or not.
    return "tool_calls" if reading.calls and generation.finish_reason == "stop" else generation.finish_reason


def describe_cost(generation: Generation) -> dict[str, Any]:
    """What a choice took."""
    cost = {**_count_passes([generation]), "passes_per_block": list(generation.passes_per_block)}
    if generation.drafted_by_offset:
        cost["drafted_by_offset"] = list(generation.drafted_by_offset)
        cost["accepted_by_offset"] = list(generation.accepted_by_offset)
    if generation.num_copied:
        cost |= {"num_copied": generation.num_copied, "num_copied_accepted": generation.num_copied_accepted}
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
