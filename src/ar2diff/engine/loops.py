"""Ways to serve one request, as loops over a session: score its prompt, decode a token at a time or by diffusion.

Each yields what it needs of the model (`engine/ask.py`) and a `Pass` a step, and ends with the answer. The slow twin
of decoding is `engine/reference.py`; the third way to decode is `engine/speculate.py`.
"""

import math
from collections.abc import Sequence
from itertools import takewhile

from ar2diff.diffusion.unmask import choose_reveals
from ar2diff.engine.ask import Steps
from ar2diff.engine.block import Block
from ar2diff.engine.generation import Pick
from ar2diff.engine.grammar import Automaton, dead_end
from ar2diff.engine.session import Session


def score_prompt(session: Session) -> Steps:
    """The prompt's log probabilities, and no answer."""
    yield from session.prefill()
    session.answer.finish_empty()
    yield session.settle(session.open_block(0), [])


def decode_ar(session: Session) -> Steps:
    """One token a forward, causally."""
    pending = yield from session.prefill()
    while not session.answer.is_finished:
        block = session.open_block(1)
        yield from reveal_anchor(session, block, pending)
        pending = block.input_ids(session.mask_token_id)


def decode_diffusion(session: Session) -> Steps:
    """A block at a time: anchor, denoise, commit; with `fused_commit` the commit shares the next first pass."""
    if session.anchor_is_last:
        yield from _decode_from_last(session)
        return
    pending, pending_is_block = (yield from session.prefill()), False
    while not session.answer.is_finished:
        block = session.open_block(session.block_size)
        if session.request.fused_commit:
            yield from _denoise(session, block, pending, pending_is_block)
        elif session.shift_logits:
            yield from reveal_anchor(session, block, pending, pending_is_block)
        else:
            hidden = yield from session.forward(pending, clean_is_block=pending_is_block)
            session.commit(hidden, len(pending))
        while not session.answer.is_finished and block.open_places():
            yield from _denoise(session, block, [], False)
        pending, pending_is_block = block.input_ids(session.mask_token_id), session.clean_is_block


def _decode_from_last(session: Session) -> Steps:
    """Blocks that begin with the last known token; its own keys and values are committed with the block behind it.

    So a block shows the model what it shows in training, and its commit shares the next block's first pass.
    """
    pending = yield from session.prefill()
    while not session.answer.is_finished:
        block, anchor = session.open_block(session.block_size - 1), pending[-1:]
        yield from _denoise(session, block, pending[:-1], False, anchor)
        while not session.answer.is_finished and block.open_places():
            yield from _denoise(session, block, [], False, anchor)
        pending = anchor + block.input_ids(session.mask_token_id)


def reveal_anchor(session: Session, block: Block, pending: list[int], pending_is_block: bool = False) -> Steps:
    """Commit the pending tokens; their last row is the AR prediction of the block's first token, its anchor."""
    hidden = yield from session.forward(pending, clean_is_block=pending_is_block)
    session.commit(hidden, len(pending))
    logits_NV = yield from session.logits(hidden, [len(pending) - 1], [block.unsettled_ids()])
    session.sampler.restrict(logits_NV, session.allowed())
    pick = session.sampler.choose(logits_NV, [(block.start, 0)])[0]
    yield session.settle(block, [block.reveal(0, pick)])


def _denoise(
    session: Session, block: Block, pending: list[int], pending_is_block: bool, last: Sequence[int] = ()
) -> Steps:
    """One denoising pass, which also commits `pending` tokens where there are some.

    Args:
        last: the token before the block, where the block shows it as its anchor.
    """
    count, shift = len(pending), int(session.shift_logits)
    reads_anchor = bool(pending) and session.shift_logits and not last
    places = block.open_places()[1:] if reads_anchor else block.open_places()
    group = (count, [*last, *block.input_ids(session.mask_token_id)])
    hidden = yield from session.forward(pending, [group], clean_is_block=pending_is_block)
    session.commit(hidden, count)
    rows = [count - 1] * reads_anchor + [count + len(last) + place - shift for place in places]
    positions = [(block.start, 0)] * reads_anchor + [(block.start + place, block.num_passes) for place in places]
    logits_NV = yield from session.logits(hidden, rows, [block.unsettled_ids()] * len(rows))
    session.sampler.restrict(logits_NV, session.allowed())
    picks = session.sampler.choose(logits_NV, positions, entropy=session.policy.needs_entropy)
    reveals = [block.reveal(0, picks.pop(0))] if reads_anchor else []
    chosen = choose_by_policy(session, block, picks)
    if session.form is not None:
        chosen = _keep_allowed(session.form, block, chosen, picks)
    yield session.settle(block, reveals + [block.reveal(places[idx], picks[idx]) for idx in chosen])


def choose_by_policy(session: Session, block: Block, picks: list[Pick]) -> list[int]:
    """Which of the picks for a block's open places to reveal; counts a pass."""
    steps = session.request.denoising_steps or block.size
    chosen = choose_reveals(
        session.policy,
        confidence=[math.exp(pick.logprob) for pick in picks],
        entropy=[pick.entropy for pick in picks],
        masked=[True] * len(picks),
        passes_left=max(1, steps - block.num_passes),
    )
    block.num_passes += 1
    return chosen


def _keep_allowed(form: Automaton, block: Block, chosen: list[int], picks: list[Pick]) -> list[int]:
    """Of the chosen picks, those that go on from the revealed left part without a gap, as far as the form allows.

    The leftmost masked place took its token from what is allowed, so it is always revealed.

    Raises:
        GenerationError: the form does not take even that one, and never would.
    """
    before = block.unsettled_ids()
    if before and block.is_end(before[-1]):
        return []
    run = list(takewhile(lambda idx: idx in chosen or (idx == 0 and not before), range(len(picks))))
    ends = [idx for idx in run if block.is_end(picks[idx].token_id)]
    run = run[: ends[0] + 1] if ends else run
    count = form.count_allowed([*before, *(picks[idx].token_id for idx in run)])
    if count < max(1, len(before)):
        raise dead_end()
    return run[: count - len(before)]
