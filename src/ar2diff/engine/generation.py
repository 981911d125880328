"""What the engine gives back: a pass at a time while it works, and the whole answer at the end. Free of torch."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
TokenLogprob = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A token chosen from one row of prepared logits.

    Attributes:
        logprob: log p under them: before temperature and limits.
        entropy: theirs, in nats; 0 where not asked for.
        top: the likeliest tokens with log p, likeliest first; as many as the request asks for.
    """

    token_id: int
    logprob: float
    entropy: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reveal:
    """One token made visible: its position in the answer, and log p of it at the pass that revealed it.

    Log p is taken under that pass's logits as the request changes them (penalties, bias, constraint, ids that are
    never emitted), before temperature and limits. `top` holds the likeliest tokens there, as many as were asked for.
    """

    position: int
    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One step of an answer.

    Attributes:
        block_idx, pass_idx: which block, and which step of it, both from 0.
        start: the answer position of the block's first token.
        token_ids: the block as it stands after this step; masked positions hold None.
        reveals: what this step revealed, by position; it may reach past the end of the answer.
        text: answer text that became final in this step: whole characters, in order.
        settled: the answer's tokens that became final in this step, in order, as in `Generation.token_ids`.
        generation: the whole answer, in the last step only.
    """

    block_idx: int
    pass_idx: int
    start: int
    token_ids: tuple[int | None, ...]
    reveals: tuple[Reveal, ...]
    text: str
    settled: tuple[Reveal, ...] = ()
    generation: "Generation | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished answer.

    Attributes:
        token_ids: the answer's ids, without the end-of-turn token; with the tokens of a trimmed stop text.
        text: the answer's text, stop text trimmed unless asked for.
        finish_reason: "stop" for an end of turn or a stop text, "length" for max_tokens or the context's end.
        logprobs, top_logprobs: of each token of `token_ids`, as in `Reveal`; in verified mode those of the AR path.
        prompt_logprobs, prompt_top_logprobs: where asked for, of each prompt token (None and nothing for the first)
            under the AR path's logits without the ids that are never emitted, whose own log p is -inf.
        num_forward_passes: forwards of the model, counted from the one that takes in the prompt's last token.
        num_prefill_passes: forwards before that one, for long prompts.
        passes_per_block: denoising passes of each block, in order; in verified mode the drafting passes of each cycle
            after the first anchor (0 for a draft that rode along or was copied), in AR mode a 0 for each token.
        drafted_by_offset, accepted_by_offset: verified mode: how often the model drafted a token at each place after
            the anchor, and how often that was accepted.
        reached_by_offset: of those drafted, how often all before it were accepted.
        num_copied, num_copied_accepted: the same for tokens that were drafted by copying, over all places.
        prefill_s, decode_s: seconds until the prompt is taken in, and from there on.
        passes: every step, where a trace was asked for.
        num_cached_tokens: prompt tokens whose keys and values were there from an earlier request.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    num_forward_passes: int
    num_prefill_passes: int
    passes_per_block: tuple[int, ...]
    drafted_by_offset: tuple[int, ...]
    accepted_by_offset: tuple[int, ...]
    prefill_s: float
    decode_s: float
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    passes: tuple[Pass, ...] = ()
    num_cached_tokens: int = 0
    num_copied: int = 0
    num_copied_accepted: int = 0
    reached_by_offset: tuple[int, ...] = ()

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens for each counted forward; 1 is what token-by-token decoding gives."""
        return len(self.token_ids) / max(1, self.num_forward_passes)

    @property
    def accepted_per_cycle(self) -> float:
        """Verified mode: drafted tokens kept in a cycle, on average; 0 where nothing was drafted."""
        cycles = self.drafted_by_offset[0] if self.drafted_by_offset else 0
        return sum(self.accepted_by_offset) / cycles if cycles else 0.0
