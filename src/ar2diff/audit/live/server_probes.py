"""Does a server denoise? Its traces against themselves, against other settings, and against the audit's own engine.

An autoregressive server has no trace. A cosmetic one, painted over tokens that were decoded one after the other,
keeps each token's probability whatever was visible when it is said to have been revealed; and it is not the trace
that the run's weights give.
"""

from itertools import pairwise, takewhile
from typing import Any

from ar2diff.audit.live.probes import MAX_TOKENS, PROMPT, StillClock
from ar2diff.audit.live.server import LiveServer, ServerError
from ar2diff.audit.result import ClaimResult
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.request import Request
from ar2diff.models.loading import LoadedModel

COMPLETIONS_PATH = "/v1/completions"
# Between two machines the same fp32 pass differs in its last bits; in int8 it is another computation.
EXACT_TOLERANCE, COARSE_TOLERANCE, COARSE_AGREEMENT = 1e-2, 0.5, 0.75
MOVED = 1e-6

Passes = list[dict[str, Any]]
Reveals = dict[tuple[int, int], float]


def probe_server(server: LiveServer, loaded: LoadedModel, result: ClaimResult, *, exact: bool) -> None:
    """All probes of one server.

    Args:
        loaded: the run's checkpoint, in fp32.
        exact: the server computes in fp32, so that its traces are to be the audit's own; otherwise most of the first
            block's first tokens are, with near probabilities.
    """
    probes = ServerProbes(server, loaded, result)
    try:
        probes.read_name()
        whole, again, once = probes.ask(None), probes.ask(None), probes.ask(1)
    except (ServerError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        text = error.one_line() if isinstance(error, ServerError) else f"no trace: {type(error).__name__} {error}"
        result.fail("server: an answer carries the trace of its passes", text, found_in=COMPLETIONS_PATH)
        return
    probes.check_masks(whole)
    here = {"claimed_in": "first answer", "found_in": "second answer"}
    result.equal("server: the same request has the same trace", _positions(whole), _positions(again), **here)
    probes.check_fewer_passes(whole, once)
    probes.check_context(whole, once)
    for steps, passes in ((None, whole), (1, once)):
        probes.compare_with_own(steps, passes, exact=exact)


class ServerProbes:
    """The probes, each a comparison in the claim's result."""

    def __init__(self, server: LiveServer, loaded: LoadedModel, result: ClaimResult) -> None:
        self._server, self._loaded, self._result = server, loaded, result
        self._name = ""
        messages = [{"role": "user", "content": PROMPT}]
        ids = loaded.tokenizer.encode_chat(messages, add_generation_prompt=True)  # type: ignore[arg-type]
        self._prompt_ids = list(ids[-(loaded.config.max_seq_len - 2 * MAX_TOKENS) :])

    def read_name(self) -> None:
        """What requests call the model."""
        self._name = str(self._server.get("/v1/models")["data"][0]["id"])

    def ask(self, steps: int | None) -> Passes:
        """The trace of one answer, greedy, with at most `steps` passes a block."""
        options = {"mode": "diffusion", "policy": "top_k", "trace": True}
        body = {
            "model": self._name,
            "prompt": self._prompt_ids,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "diffusion": options if steps is None else {**options, "denoising_steps": steps},
        }
        told = self._server.post(COMPLETIONS_PATH, body)["choices"][0]["diffusion"]
        passes: Passes = told["passes"]
        forwards = int(told["num_forward_passes"])
        where = {"claimed_in": "num_forward_passes", "found_in": "trace"}
        self._result.holds(
            "server: every traced pass is a counted forward",
            0 < len(passes) <= forwards,
            claimed=f"{forwards} forwards",
            found=f"{len(passes)} passes",
            **where,
        )
        _reveals(passes)
        return passes

    def check_masks(self, passes: Passes) -> None:
        """A block begins masked, its masks fall to 0, and each position is revealed once.

        The last block may keep masks behind an end token, or behind the last token that was asked for.
        """
        faults = []
        positions = [reveal["position"] for step in passes for reveal in step["reveals"]]
        last = max((step["block_idx"] for step in passes), default=0)
        for idx in sorted({step["block_idx"] for step in passes}):
            masks = [sum(token is None for token in step["token_ids"]) for step in passes if step["block_idx"] == idx]
            rises = any(later >= before for before, later in pairwise(masks))
            is_whole = masks[-1] == 0 or (idx == last and self._is_over(passes[-1]["token_ids"], len(positions)))
            if rises or not is_whole:
                faults.append(f"block {idx}: {masks}")
        here = {"claimed_in": "block by block, down to 0", "found_in": "trace"}
        self._result.equal("server: blocks whose masked count does not fall to 0", [], faults[:3], **here)
        self._result.equal("server: every position is revealed once", len(positions), len(set(positions)), **here)

    def _is_over(self, token_ids: list[int | None], num_revealed: int) -> bool:
        before_gap = list(takewhile(lambda token: token is not None, token_ids))
        is_cut = num_revealed == MAX_TOKENS and all(token is None for token in token_ids[len(before_gap) :])
        return is_cut or any(token in self._loaded.tokenizer.eos_token_ids for token in before_gap)

    def check_fewer_passes(self, whole: Passes, once: Passes) -> None:
        """One step a block reveals whole blocks; a shifted model's anchor comes from a pass of its own."""
        diffusion = self._loaded.diffusion
        assert diffusion is not None
        most = 1 + diffusion.shift_logits
        found = max(sum(step["block_idx"] == idx for step in once) for idx in {step["block_idx"] for step in once})
        fewer = len(once) < len(whole) or diffusion.block_size <= most
        self._result.holds(
            "server: one denoising step takes one pass a block and that of the anchor",
            found <= most and fewer,
            claimed=f"{most} a block, fewer than {len(whole)} in all",
            claimed_in="denoising_steps 1",
            found=f"{found} a block, {len(once)} in all",
            found_in="trace",
        )

    def check_context(self, whole: Passes, once: Passes) -> None:
        """What is visible decides: revealed later, a token is another one or has another probability."""
        late = {key: value for step in whole if step["pass_idx"] > 0 for key, value in _reveals([step]).items()}
        early = _reveals(once)
        moved = [key for key, value in late.items() if key not in early or abs(early[key] - value) > MOVED]
        self._result.holds(
            "server: a token revealed in a later pass depends on what was revealed before it",
            bool(moved),
            claimed="some differ",
            claimed_in="denoising",
            found=f"{len(moved)} of {len(late)} differ",
            found_in="traces with one step and with many",
        )

    def compare_with_own(self, steps: int | None, passes: Passes, *, exact: bool) -> None:
        """The run's weights, in the audit's own engine, give this trace."""
        request = Request(
            prompt_ids=tuple(self._prompt_ids),
            max_tokens=MAX_TOKENS,
            policy="top_k",
            denoising_steps=steps,
            trace=True,
        )
        own = _own_passes(Engine(self._loaded, clock=StillClock()).generate(request))
        what = f"server: the trace of {'one step' if steps == 1 else 'many steps'} is that of the run's weights"
        here = {"claimed_in": COMPLETIONS_PATH, "found_in": "the audit's engine"}
        if exact:
            same = self._result.equal(what, _positions(passes), _positions(own), **here)
            if same:
                theirs, ours = _reveals(passes), _reveals(own)
                largest = max((abs(theirs[key] - ours[key]) for key in ours), default=0.0)
                known = largest <= EXACT_TOLERANCE
                shown = f"{largest:.2g} apart"
                self._result.holds(
                    f"{what}, with its probabilities", known, claimed=EXACT_TOLERANCE, found=shown, **here
                )
            return
        # The first block in one step: nothing that was rounded otherwise has been built upon yet.
        if steps != 1:
            return
        theirs, ours = (_reveals([step for step in all_ if step["block_idx"] == 0]) for all_ in (passes, own))
        near = [key for key in ours if key in theirs and abs(theirs[key] - ours[key]) <= COARSE_TOLERANCE]
        enough = len(near) >= COARSE_AGREEMENT * len(ours)
        found = f"{len(near)} of {len(ours)} tokens of the first block"
        self._result.holds(what, enough, claimed="most", found=found, **here)


def _own_passes(generation: Generation) -> Passes:
    return [
        {
            "block_idx": step.block_idx,
            "pass_idx": step.pass_idx,
            "reveals": [{"position": r.position, "token_id": r.token_id, "logprob": r.logprob} for r in step.reveals],
        }
        for step in generation.passes
    ]


def _positions(passes: Passes) -> list[list[list[int]]]:
    return [[[int(r["position"]), int(r["token_id"])] for r in step["reveals"]] for step in passes]


def _reveals(passes: Passes) -> Reveals:
    return {(int(r["position"]), int(r["token_id"])): float(r["logprob"]) for step in passes for r in step["reveals"]}
