"""Is it iterative denoising? Five probes on the engine that answers requests; an AR model fails the first.

Shape letters: S block, V vocabulary.
"""

from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from ar2diff.audit.result import ClaimResult
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError, UnsupportedModelError
from ar2diff.models.loading import LoadedModel, load_model

PROMPT = "Write the order as JSON: three apples and one pear for Ada Lovelace."
MAX_TOKENS = 24
NOISE_SEED, NOISE_SCALE = 0, 2.0


class StillClock:
    """Time does not matter to a probe."""

    def utc(self) -> datetime:
        """The epoch."""
        return datetime.fromtimestamp(0, UTC)

    def seconds(self) -> float:
        """Always 0."""
        return 0.0


def run_probes(checkpoint: Path, where: str, result: ClaimResult) -> None:
    """All five probes, in fp32 on the CPU."""
    loaded = load_model(checkpoint)
    if loaded.diffusion is None:
        result.fail(
            "the checkpoint is a block-diffusion model", "no diffusion settings", found_in=f"{where}/config.json"
        )
        return
    if loaded.diffusion.block_size < 2:
        result.fail("a block has several tokens", loaded.diffusion.block_size, found_in=f"{where}/config.json")
        return
    try:
        probes = Probes(loaded, where, result)
        probes.reveal_later_token()
        probes.change_later_block()
        generation = probes.count_forwards()
        probes.replay(generation)
        probes.add_noise(generation)
    except UnsupportedModelError as error:
        result.missing("an engine that decodes this model", found=error.one_line(), found_in="this version")
    except Ar2diffError as error:
        result.fail("the checkpoint decodes", error.one_line(), found_in=where)


class Probes:
    """The probes of one model; the last one spoils it."""

    def __init__(self, loaded: LoadedModel, where: str, result: ClaimResult) -> None:
        assert loaded.diffusion is not None
        self._loaded, self._where, self._result = loaded, where, result
        self._clock = StillClock()
        self._engine = Engine(loaded, clock=self._clock)
        messages = [{"role": "user", "content": PROMPT}]
        prompt_ids = loaded.tokenizer.encode_chat(messages, add_generation_prompt=True)  # type: ignore[arg-type]
        room = loaded.config.max_seq_len - 2 * MAX_TOKENS
        self._request = Request(
            prompt_ids=tuple(prompt_ids[-room:]), max_tokens=MAX_TOKENS, policy="top_k", trace=True
        )
        self._mask_id, self._size = loaded.diffusion.mask_token_id, loaded.diffusion.block_size

    def reveal_later_token(self) -> None:
        """Probe 1: a token revealed at the end of a masked block moves the logits before it; causally, it cannot."""
        masked = [self._mask_id] * self._size
        token_id = self._request.prompt_ids[0]
        revealed = [*masked[:-1], token_id]
        in_block = self._largest_change(self._block_logits(masked), self._block_logits(revealed))
        causal = self._largest_change(self._causal_logits(masked), self._causal_logits(revealed))
        here = {"claimed_in": "block attention", "found_in": self._where}
        self._result.holds(
            "1: revealing a token at j > i moves the logits at i",
            in_block > 0,
            claimed="above 0",
            found=f"{in_block:.2g}",
            **here,
        )
        self._result.holds(
            "1: in the causal model it does not",
            causal == 0.0,
            claimed="exactly 0",
            found=f"{causal:.2g}",
            claimed_in="causal attention",
            found_in=self._where,
        )

    def change_later_block(self) -> None:
        """Probe 2: what stands in a later block changes nothing in what is settled before it."""
        one = self._session_rows([self._mask_id] * self._size)[0]
        other = self._session_rows([self._request.prompt_ids[-1]] * self._size)[0]
        change = float((one - other).abs().max())
        self._result.holds(
            "2: a later block changes nothing earlier",
            change == 0.0,
            claimed="exactly 0",
            claimed_in="block attention",
            found=f"{change:.2g}",
            found_in=self._where,
        )

    def count_forwards(self) -> Generation:
        """Probe 3: passes as a module hook counts them, masks falling to 0, revealed tokens being those emitted."""
        calls = []
        hook = self._engine.runner.register_forward_hook(lambda *_: calls.append(1))
        try:
            generation = self._engine.generate(self._request)
        finally:
            hook.remove()
        counted = generation.num_forward_passes + generation.num_prefill_passes
        here = {"claimed_in": "engine", "found_in": "forward hook"}
        self._result.equal("3: forward passes", counted, len(calls), **here)
        self._check_masks(generation)
        return generation

    def replay(self, generation: Generation) -> None:
        """Probe 4: the trace comes again pass by pass, and the slow twin of the engine gives the same answer."""
        again = Engine(self._loaded, clock=self._clock).generate(self._request)
        here = {"claimed_in": "trace", "found_in": "replay"}
        self._result.equal("4: (position, token) of every pass", _trace(generation), _trace(again), **here)
        right = generate_reference(self._loaded, self._request)
        claimed = [list(generation.token_ids), generation.finish_reason]
        self._result.equal(
            "4: the answer",
            claimed,
            [list(right.token_ids), right.finish_reason],
            claimed_in="engine",
            found_in="engine/reference.py",
        )

    def add_noise(self, generation: Generation) -> None:
        """Probe 5: with noise on one layer the replay diverges, so the trace comes from these weights."""
        generator = torch.Generator().manual_seed(NOISE_SEED)
        layer = self._loaded.decoder.layers[len(self._loaded.decoder.layers) // 2]
        with torch.no_grad():
            for parameter in layer.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std(correction=0) * NOISE_SCALE)
        noisy = Engine(self._loaded, clock=self._clock).generate(self._request)
        same = _with_logprobs(noisy) == _with_logprobs(generation)
        found = "the same trace" if same else "another trace"
        self._result.holds(
            "5: noise on a layer makes the replay diverge",
            not same,
            claimed="another trace",
            claimed_in="noise",
            found=found,
            found_in=self._where,
        )

    def _check_masks(self, generation: Generation) -> None:
        revealed = {r.position: r.token_id for step in generation.passes for r in step.reveals}
        num_reveals = sum(len(step.reveals) for step in generation.passes)
        emitted = dict(enumerate(generation.token_ids))
        here = {"claimed_in": "answer", "found_in": "trace"}
        self._result.equal("3: every position is revealed once", num_reveals, len(revealed), **here)
        same = {position: revealed.get(position) for position in emitted} == emitted
        self._result.holds(
            "3: revealed tokens are those emitted",
            same,
            claimed=list(emitted.values()),
            found=list(revealed.values()),
            **here,
        )
        masks = [sum(token is None for token in step.token_ids) for step in generation.passes]
        starts = [step.start for step in generation.passes]
        rises = [i for i in range(1, len(masks)) if starts[i] == starts[i - 1] and masks[i] > masks[i - 1]]
        self._result.equal("3: passes after which more is masked than before", [], rises, **here)
        self._result.holds(
            "3: a block takes several passes",
            len(masks) > len(set(starts)),
            claimed=f"more than {len(set(starts))}",
            found=len(masks),
            **here,
        )

    def _session_rows(self, block_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Hidden states of the settled rows and of the block after them, from one pass of the engine."""
        session = self._engine.open_session(self._request)
        with torch.inference_mode():
            chunk = self._engine.passes.run_alone(session.prefill(), session.cache)
            asks = session.forward(chunk, [(len(chunk), block_ids)])
            hidden = self._engine.passes.run_alone(asks, session.cache)
        return hidden[: len(chunk)], hidden[len(chunk) : len(chunk) + len(block_ids)]

    def _block_logits(self, block_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return self._engine.runner.logits(self._session_rows(block_ids)[1])

    def _causal_logits(self, ids: list[int]) -> Tensor:
        session = self._engine.open_session(self._request)
        with torch.inference_mode():
            chunk = self._engine.passes.run_alone(session.prefill(), session.cache)
            hidden = self._engine.passes.run_alone(session.forward([*chunk, *ids]), session.cache)
            return self._engine.runner.logits(hidden[len(chunk) : len(chunk) + len(ids)])

    def _largest_change(self, one_SV: Tensor, other_SV: Tensor) -> float:
        """Over all positions but the last, whose own token was changed."""
        change = (one_SV[:-1] - other_SV[:-1]).abs().max()
        return float(change) if bool(torch.isfinite(change)) else float("nan")


def _trace(generation: Generation) -> list[list[list[int]]]:
    return [[[r.position, r.token_id] for r in step.reveals] for step in generation.passes]


def _with_logprobs(generation: Generation) -> list[list[tuple[int, int, float]]]:
    return [[(r.position, r.token_id, r.logprob) for r in step.reveals] for step in generation.passes]
