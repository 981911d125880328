"""One request's life on the engine: its cache, its answer, its counters. The decoding loops ask through it.

Shape letters: L new tokens, N chosen rows, E model dim, V vocabulary.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

from torch import Tensor

from ar2diff.attention.kv_cache import PagedCache
from ar2diff.clock import Clock
from ar2diff.engine.answer import Answer
from ar2diff.engine.ask import Ask, ForwardAsk, Group, LogitsAsk
from ar2diff.engine.block import Block
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.copying import CopyDrafts
from ar2diff.engine.draft_plan import PassCosts
from ar2diff.engine.generation import Generation, Pass, Reveal
from ar2diff.engine.grammar import Automaton
from ar2diff.engine.request import Request
from ar2diff.engine.sampling import Sampler, check_finite
from ar2diff.engine.scores import PromptScores
from ar2diff.engine.verify import AcceptanceLog
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.tokenizer import Tokenizer


class Session:
    """State of one running request.

    Attributes:
        cache: its keys and values; what is committed at the start is a prefix of the prompt.
        block_size, mask_token_id: of the checkpoint; 1 and -1 for an AR model, which never uses them.
        shift_logits, clean_is_block, anchor_is_last: of the checkpoint.
        form: where the settled answer stands in its constraint, if it has one.
        acceptance, copies: what verification kept of the model's drafts, and of copied ones.
        costs: what passes cost, where the length of a draft is chosen by it.
    """

    def __init__(
        self,
        request: Request,
        *,
        model: DecoderConfig,
        cache: PagedCache,
        tokenizer: Tokenizer,
        diffusion: DiffusionConfig | None,
        config: EngineConfig,
        clock: Clock,
        form: Automaton | None = None,
        costs: PassCosts | None = None,
    ) -> None:
        self.request, self.config, self.form, self.costs = request, config, form, costs
        self.max_seq_len = model.max_seq_len
        self.block_size = request.block_size or (diffusion.block_size if diffusion else 1)
        self.mask_token_id = diffusion.mask_token_id if diffusion else -1
        self.shift_logits = diffusion is None or diffusion.shift_logits
        self.anchor_is_last = diffusion is not None and diffusion.anchor == "last"
        self.clean_is_block = diffusion is not None and diffusion.clean_attention == "block"
        self.policy = request.build_policy()
        self.answer = Answer(request, tokenizer, max_seq_len=self.max_seq_len, form=form)
        never = {*config.never_emit_ids, *tokenizer.list_unknown(model.vocab_size)}
        never |= {self.mask_token_id} if diffusion else set()
        self.sampler = Sampler(request, sorted(never), device=cache.store.keys.device)
        self.cache, self._num_cached = cache, cache.length
        self.acceptance, self.copies = AcceptanceLog(), CopyDrafts()
        self.prompt_scores = PromptScores(self.sampler, request.prompt_logprobs or 0)
        self._blocks: list[Block] = []
        self._clock = clock
        self._num_forwards = self._num_prefills = 0
        self._steps: list[Pass] = []
        self._pass_idx = 0
        self._started_s = self._prefilled_s = clock.seconds()

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt is taken in."""
        return self._num_forwards > 0

    @property
    def reusable_ids(self) -> list[int]:
        """Ids whose keys and values, once committed, are those that any request with this beginning would have."""
        if self.clean_is_block:
            return list(self.request.prompt_ids)
        return [*self.request.prompt_ids, *self.answer.token_ids]

    @property
    def num_blocks(self) -> int:
        """How many blocks there were so far."""
        return len(self._blocks)

    def prefill(self) -> Generator[Ask, Tensor, list[int]]:
        """Take in the prompt but for its last chunk, which is returned: it shares the first counted forward.

        A prompt that is scored is taken in but for its last token: that one's row predicts the answer.
        """
        ids, chunk = list(self.request.prompt_ids[self.cache.length :]), self.config.prefill_chunk
        scores = None if self.request.prompt_logprobs is None else self.prompt_scores
        while len(ids) > (chunk if scores is None else 1):
            rows = min(chunk, len(ids) - (scores is not None))
            hidden_LE = yield ForwardAsk(clean=ids[:rows], is_prefill=True)
            if scores is not None:
                yield from scores.add(hidden_LE, ids[1 : rows + 1])
            self.commit(hidden_LE, rows)
            self._num_prefills += 1
            del ids[:rows]
        return ids

    def forward(
        self, clean: Sequence[int], groups: Sequence[Group] = (), *, clean_is_block: bool = False
    ) -> Generator[Ask, Tensor, Tensor]:
        """One counted forward; hidden states, shape (L, E), clean rows first, then the groups' rows.

        Clean rows follow the committed prefix causally (or as one block); a group follows the clean rows it sees.
        """
        hidden_LE = yield ForwardAsk(clean=clean, groups=groups, clean_is_block=clean_is_block)
        self._num_forwards += 1
        if self._num_forwards == 1:
            self._prefilled_s = self._clock.seconds()
        return hidden_LE

    def commit(self, hidden_LE: Tensor, count: int) -> None:
        """Make a forward's first rows part of the prefix, once they are known to be finite.

        A page outlives its request: what is not finite in it would spoil others, even where it is masked.

        Raises:
            GenerationError: they are not finite.
        """
        check_finite(hidden_LE[:count])
        self.cache.commit(count)

    def logits(
        self, hidden_LE: Tensor, rows: Sequence[int], revealed: Sequence[Sequence[int]]
    ) -> Generator[Ask, Tensor, Tensor]:
        """Logits of some rows, ready for the sampler but for the constraint, shape (N, V).

        Args:
            revealed: for each row, the tokens that its penalties count beside the settled answer.

        Raises:
            GenerationError: they are not finite.
        """
        settled = self.answer.token_ids
        generated = [[*settled, *ids] for ids in revealed] if self.request.has_penalties else []
        return self.sampler.prepare((yield LogitsAsk(hidden_NE=hidden_LE[list(rows)])), generated)

    def allowed(self) -> list[Tensor]:
        """What the constraint lets follow the settled answer, for `Sampler.restrict`; empty without one."""
        return [self.form.allowed()] if self.form is not None else []

    def open_block(self, size: int) -> Block:
        """The next block, at the end of the settled answer."""
        self._pass_idx = 0
        start = len(self.answer.token_ids)
        size = min(size, self.max_seq_len - len(self.request.prompt_ids) - start)
        block = Block(start=start, size=size, wanted=self.answer.limit - start, is_end=self.answer.is_end)
        self._blocks.append(block)
        return block

    def settle(self, block: Block, reveals: Sequence[Reveal]) -> Pass:
        """Hand the block's finished left part to the answer; returns the step as the caller sees it."""
        text, num_before = "", len(self.answer.settled)
        while not self.answer.is_finished and block.num_settled < block.size:
            token = block.reveals.get(block.num_settled)
            if token is None:
                break
            text += self.answer.push(token)
            block.num_settled += 1
        step = Pass(
            block_idx=self.num_blocks - 1,
            pass_idx=self._pass_idx,
            start=block.start,
            token_ids=tuple(block.token_ids),
            reveals=tuple(reveals),
            text=text,
            settled=tuple(self.answer.settled[num_before:]),
        )
        self._pass_idx += 1
        if self.request.trace:
            self._steps.append(step)
        return step

    def finish(self, step: Pass) -> Pass:
        """The last step, with the whole answer."""
        return replace(step, generation=self._build_generation())

    def _build_generation(self) -> Generation:
        answer = self.answer
        assert answer.finish_reason is not None
        is_scored = self.request.prompt_logprobs is not None
        return Generation(
            token_ids=tuple(answer.token_ids),
            text=answer.text,
            finish_reason=answer.finish_reason,
            logprobs=tuple(token.logprob for token in answer.settled),
            top_logprobs=tuple(token.top for token in answer.settled),
            prompt_logprobs=tuple(self.prompt_scores.logprobs) if is_scored else (),
            prompt_top_logprobs=tuple(self.prompt_scores.tops) if is_scored else (),
            num_forward_passes=self._num_forwards,
            num_prefill_passes=self._num_prefills,
            passes_per_block=tuple(block.num_passes for block in self._blocks),
            drafted_by_offset=tuple(self.acceptance.drafted_by_offset),
            accepted_by_offset=tuple(self.acceptance.accepted_by_offset),
            num_copied=sum(sum(log.drafted_by_offset) for log in self.copies.logs.values()),
            num_copied_accepted=sum(sum(log.accepted_by_offset) for log in self.copies.logs.values()),
            reached_by_offset=tuple(self.acceptance.reached_by_offset),
            prefill_s=self._prefilled_s - self._started_s,
            decode_s=self._clock.seconds() - self._prefilled_s,
            passes=tuple(self._steps),
            num_cached_tokens=self._num_cached,
        )


def count_places(
    request: Request, model: DecoderConfig, diffusion: DiffusionConfig | None, *, row_multiple: int
) -> int:
    """KV places that a request needs at most: its tokens, and the widest pass behind them."""
    block_size = request.block_size or (diffusion.block_size if diffusion else 1)
    # A draft has fewer than `block_size` tokens, so no more acceptance lengths than that can have a lane.
    widest = block_size * (2 + min(request.draft_lanes, block_size)) + row_multiple
    num_prompt = len(request.prompt_ids)
    return num_prompt + min(request.max_tokens, model.max_seq_len - num_prompt) + widest
