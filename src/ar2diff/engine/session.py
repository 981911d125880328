"""One request's life on the engine: its cache, its answer, its counters. The decoding loops drive it.

Shape letters: L new tokens, N chosen rows, E model dim, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ar2diff.attention.kv_cache import KVCache
from ar2diff.clock import Clock
from ar2diff.engine.answer import Answer
from ar2diff.engine.block import Block
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.generation import Generation, Pass, Reveal
from ar2diff.engine.grammar import Automaton
from ar2diff.engine.precision import AnyRunner
from ar2diff.engine.request import Request
from ar2diff.engine.sampling import Sampler
from ar2diff.engine.verify import AcceptanceLog
from ar2diff.models.config import DiffusionConfig
from ar2diff.tokenizer import Tokenizer

# Rows that see the prefix, the first `int` clean rows of the same pass, and each other.
Group = tuple[int, list[int]]


class Session:
    """State of one running request.

    Attributes:
        block_size, mask_token_id: of the checkpoint; 1 and -1 for an AR model, which never uses them.
        shift_logits, clean_is_block: of the checkpoint.
        form: where the settled answer stands in its constraint, if it has one.
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
        form: Automaton | None = None,
    ) -> None:
        self.request, self.config, self.form = request, config, form
        self.max_seq_len = runner.config.max_seq_len
        self.block_size = request.block_size or (diffusion.block_size if diffusion else 1)
        self.mask_token_id = diffusion.mask_token_id if diffusion else -1
        self.shift_logits = diffusion is None or diffusion.shift_logits
        self.clean_is_block = diffusion is not None and diffusion.clean_attention == "block"
        self.policy = request.build_policy()
        self.answer = Answer(request, tokenizer, max_seq_len=self.max_seq_len, form=form)
        unknown = range(tokenizer.vocab_size, runner.config.vocab_size)
        never = {*config.never_emit_ids, *unknown} | ({self.mask_token_id} if diffusion else set())
        self.sampler = Sampler(request, sorted(never), device=runner.device)
        self._row_multiple = 1 if runner.rows_are_independent else config.row_multiple
        self.cache = self._build_cache(runner)
        self.acceptance = AcceptanceLog()
        self._blocks: list[Block] = []
        self._runner, self._clock = runner, clock
        self._num_forwards = self._num_prefills = 0
        self._steps: list[Pass] = []
        self._pass_idx = 0
        self._started_s = self._prefilled_s = clock.seconds()

    @property
    def num_blocks(self) -> int:
        """How many blocks there were so far."""
        return len(self._blocks)

    def prefill(self) -> list[int]:
        """Take in the prompt but for its last chunk, which is returned: it shares the first counted forward."""
        ids, chunk = list(self.request.prompt_ids), self.config.prefill_chunk
        while len(ids) > chunk:
            self._run(ids[:chunk], (), pad_to=1)
            self.cache.commit(chunk)
            self._num_prefills += 1
            del ids[:chunk]
        return ids

    def forward(self, clean: Sequence[int], groups: Sequence[Group] = (), *, clean_is_block: bool = False) -> Tensor:
        """One counted forward; hidden states, shape (L, E), clean rows first, then the groups' rows.

        Clean rows follow the committed prefix causally (or as one block); a group follows the clean rows it sees.
        """
        hidden_LE = self._run(clean, groups, pad_to=self._row_multiple, clean_is_block=clean_is_block)
        self._num_forwards += 1
        if self._num_forwards == 1:
            self._prefilled_s = self._clock.seconds()
        return hidden_LE

    def logits(self, hidden_LE: Tensor, rows: Sequence[int], revealed: Sequence[Sequence[int]]) -> Tensor:
        """Logits of some rows, ready for the sampler but for the constraint, shape (N, V).

        Args:
            revealed: for each row, the tokens that its penalties count beside the settled answer.

        Raises:
            GenerationError: they are not finite.
        """
        settled = self.answer.token_ids
        generated = [[*settled, *ids] for ids in revealed] if self.request.has_penalties else []
        return self.sampler.prepare(self._runner.logits(hidden_LE[list(rows)]), generated)

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
        return Generation(
            token_ids=tuple(answer.token_ids),
            text=answer.text,
            finish_reason=answer.finish_reason,
            logprobs=tuple(token.logprob for token in answer.settled),
            top_logprobs=tuple(token.top for token in answer.settled),
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
        widest = self.block_size * (2 + min(self.request.draft_lanes, self.block_size)) + self._row_multiple
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

    def _run(
        self, clean: Sequence[int], groups: Sequence[Group], *, pad_to: int, clean_is_block: bool = False
    ) -> Tensor:
        ids, start = list(clean), self.cache.length
        positions = list(range(start, start + len(ids)))
        for seen, group_ids in groups:
            ids += group_ids
            positions += range(start + seen, start + seen + len(group_ids))
        padding = -len(ids) % pad_to
        ids += ids[-1:] * padding
        positions += positions[-1:] * padding
        shape = tuple((seen, len(group_ids)) for seen, group_ids in groups)
        mask_LL = build_pass_mask(len(clean), shape, padding, clean_is_block, self._runner.device)
        hidden: Tensor = self._runner(
            torch.tensor(ids, device=self._runner.device),
            torch.tensor(positions, device=self._runner.device),
            self.cache.attend_with(mask_LL),
        )
        return hidden


@lru_cache(maxsize=256)
def build_pass_mask(
    num_clean: int, groups: tuple[tuple[int, int], ...], padding: int, clean_is_block: bool, device: torch.device
) -> Tensor | None:
    """Who sees whom among a pass's rows, boolean (L, L); None where all see all.

    Args:
        groups: for each, how many clean rows it sees and its size.
        padding: rows at the end that nobody sees.
    """
    length = num_clean + sum(size for _, size in groups) + padding
    mask_LL = torch.zeros(length, length, dtype=torch.bool, device=device)
    clean = torch.ones(num_clean, num_clean, dtype=torch.bool, device=device)
    mask_LL[:num_clean, :num_clean] = clean if clean_is_block else clean.tril()
    first = num_clean
    for seen, size in groups:
        mask_LL[first : first + size, :seen] = True
        mask_LL[first : first + size, first : first + size] = True
        first += size
    mask_LL[first:, first:] = True
    return None if bool(mask_LL.all()) else mask_LL
