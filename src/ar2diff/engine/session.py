"""One request's life on the engine: its cache, its answer, its counters. The decoding loops ask through it.

Shape letters: L new tokens, N chosen rows, E model dim, V vocabulary.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

from torch import Tensor

from ar2diff.attention.kv_cache import KVCache
from ar2diff.clock import Clock
from ar2diff.engine.answer import Answer
from ar2diff.engine.ask import Ask, ForwardAsk, Group, LogitsAsk
from ar2diff.engine.block import Block
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.generation import Generation, Pass, Reveal
from ar2diff.engine.precision import AnyRunner
from ar2diff.engine.request import Request
from ar2diff.engine.sampling import Sampler
from ar2diff.engine.verify import AcceptanceLog
from ar2diff.models.config import DiffusionConfig
from ar2diff.tokenizer import Tokenizer


class Session:
    """State of one running request.

    Attributes:
        block_size, mask_token_id: of the checkpoint; 1 and -1 for an AR model, which never uses them.
        shift_logits, clean_is_block: of the checkpoint.
    """

    def __init__(
        self,
        request: Request,
        *,
        runner: AnyRunner,
        tokenizer: Tokenizer,
        diffusion: DiffusionConfig | None,
        config: EngineConfig,
        clock: Clock,
    ) -> None:
        self.request, self.config = request, config
        self.max_seq_len = runner.config.max_seq_len
        self.block_size = request.block_size or (diffusion.block_size if diffusion else 1)
        self.mask_token_id = diffusion.mask_token_id if diffusion else -1
        self.shift_logits = diffusion is None or diffusion.shift_logits
        self.clean_is_block = diffusion is not None and diffusion.clean_attention == "block"
        self.policy = request.build_policy()
        self.answer = Answer(request, tokenizer, max_seq_len=self.max_seq_len)
        unknown = range(tokenizer.vocab_size, runner.config.vocab_size)
        never = {*config.never_emit_ids, *unknown} | ({self.mask_token_id} if diffusion else set())
        self.sampler = Sampler(request, sorted(never), device=runner.device)
        self.cache = self._build_cache(runner)
        self.acceptance = AcceptanceLog()
        self._blocks: list[Block] = []
        self._clock = clock
        self._num_forwards = self._num_prefills = 0
        self._steps: list[Pass] = []
        self._pass_idx = 0
        self._started_s = self._prefilled_s = clock.seconds()

    @property
    def num_blocks(self) -> int:
        """How many blocks there were so far."""
        return len(self._blocks)

    def prefill(self) -> Generator[Ask, Tensor, list[int]]:
        """Take in the prompt but for its last chunk, which is returned: it shares the first counted forward."""
        ids, chunk = list(self.request.prompt_ids), self.config.prefill_chunk
        while len(ids) > chunk:
            yield ForwardAsk(clean=ids[:chunk], is_prefill=True)
            self.cache.commit(chunk)
            self._num_prefills += 1
            del ids[:chunk]
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

    def logits(self, hidden_LE: Tensor, rows: Sequence[int]) -> Generator[Ask, Tensor, Tensor]:
        """Logits of some rows, ready for the sampler, shape (N, V).

        Raises:
            GenerationError: they are not finite.
        """
        logits_NV = yield LogitsAsk(hidden_NE=hidden_LE[list(rows)])
        return self.sampler.prepare(logits_NV)

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
        text = ""
        while not self.answer.is_finished and block.num_settled < block.size:
            token_id = block.token_ids[block.num_settled]
            if token_id is None:
                break
            text += self.answer.push(token_id, block.logprobs[block.num_settled])
            block.num_settled += 1
        step = Pass(
            block_idx=self.num_blocks - 1,
            pass_idx=self._pass_idx,
            start=block.start,
            token_ids=tuple(block.token_ids),
            reveals=tuple(reveals),
            text=text,
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
        return Generation(
            token_ids=tuple(answer.token_ids),
            text=answer.text,
            finish_reason=answer.finish_reason,
            logprobs=tuple(answer.logprobs),
            num_forward_passes=self._num_forwards,
            num_prefill_passes=self._num_prefills,
            passes_per_block=tuple(block.num_passes for block in self._blocks),
            drafted_by_offset=tuple(self.acceptance.drafted_by_offset),
            accepted_by_offset=tuple(self.acceptance.accepted_by_offset),
            prefill_s=self._prefilled_s - self._started_s,
            decode_s=self._clock.seconds() - self._prefilled_s,
            passes=tuple(self._steps),
        )

    def _build_cache(self, runner: AnyRunner) -> KVCache:
        config = runner.config
        # A draft has fewer than `block_size` tokens, so no more acceptance lengths than that can have a lane.
        widest = self.block_size * (2 + min(self.request.draft_lanes, self.block_size)) + self.config.row_multiple
        capacity = len(self.request.prompt_ids) + self.answer.limit + widest
        runner.reserve(capacity)
        return KVCache(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            softmax_scale=config.softmax_scale,
            capacity=capacity,
            dtype=runner.dtype,
            device=runner.device,
        )
