"""Two ways to decode one request, as loops over a session: a token at a time, and by diffusion.

Each yields what it needs of the model (`engine/ask.py`) and a `Pass` a step, and ends with the answer. The slow twin
of both is `engine/reference.py`; the third way is `engine/speculate.py`.
"""

import math

from ar2diff.diffusion.unmask import choose_reveals
from ar2diff.engine.ask import Steps
from ar2diff.engine.block import Block
from ar2diff.engine.generation import Reveal
from ar2diff.engine.sampling import Choice
from ar2diff.engine.session import Session


def decode_ar(session: Session) -> Steps:
    """One token a forward, causally."""
    pending = yield from session.prefill()
    while not session.answer.is_finished:
        block = session.open_block(1)
        yield from reveal_anchor(session, block, pending)
        pending = block.input_ids(session.mask_token_id)


def decode_diffusion(session: Session) -> Steps:
    """A block at a time: anchor, denoise, commit; with `fused_commit` the commit shares the next first pass."""
    pending, pending_is_block = (yield from session.prefill()), False
    while not session.answer.is_finished:
        block = session.open_block(session.block_size)
        if session.request.fused_commit:
            yield from _denoise(session, block, pending, pending_is_block)
        elif session.shift_logits:
            yield from reveal_anchor(session, block, pending, pending_is_block)
        else:
            yield from session.forward(pending, clean_is_block=pending_is_block)
            session.cache.commit(len(pending))
        while not session.answer.is_finished and block.open_places():
            yield from _denoise(session, block, [], False)
        pending, pending_is_block = block.input_ids(session.mask_token_id), session.clean_is_block


def reveal_anchor(session: Session, block: Block, pending: list[int], pending_is_block: bool = False) -> Steps:
    """Commit the pending tokens; their last row is the AR prediction of the block's first token, its anchor."""
    hidden = yield from session.forward(pending, clean_is_block=pending_is_block)
    session.cache.commit(len(pending))
    logits_NV = yield from session.logits(hidden, [len(pending) - 1])
    choice = session.sampler.choose(logits_NV, [(block.start, 0)])
    yield session.settle(block, [block.reveal(0, choice.token_ids[0], choice.logprobs[0])])


def _denoise(session: Session, block: Block, pending: list[int], pending_is_block: bool) -> Steps:
    """One denoising pass, which also commits `pending` tokens where there are some."""
    count, shift = len(pending), int(session.shift_logits)
    reads_anchor = bool(pending) and session.shift_logits
    places = block.open_places()[1:] if reads_anchor else block.open_places()
    group = (count, block.input_ids(session.mask_token_id))
    hidden = yield from session.forward(pending, [group], clean_is_block=pending_is_block)
    session.cache.commit(count)
    rows = [count - 1] * reads_anchor + [count + place - shift for place in places]
    positions = [(block.start, 0)] * reads_anchor + [(block.start + place, block.num_passes) for place in places]
    logits_NV = yield from session.logits(hidden, rows)
    choice = session.sampler.choose(logits_NV, positions, entropy=session.policy.needs_entropy)
    reveals: list[Reveal] = []
    if reads_anchor:
        reveals.append(block.reveal(0, choice.token_ids[0], choice.logprobs[0]))
        choice = Choice(token_ids=choice.token_ids[1:], logprobs=choice.logprobs[1:], entropies=choice.entropies[1:])
    reveals += reveal_by_policy(session, block, places, choice)
    yield session.settle(block, reveals)


def reveal_by_policy(session: Session, block: Block, places: list[int], choice: Choice) -> list[Reveal]:
    """Reveal what the policy picks among `places`, for which `choice` holds tokens."""
    steps = session.request.denoising_steps or block.size
    picked = choose_reveals(
        session.policy,
        confidence=[math.exp(logprob) for logprob in choice.logprobs],
        entropy=choice.entropies,
        masked=[True] * len(places),
        passes_left=max(1, steps - block.num_passes),
    )
    block.num_passes += 1
    return [block.reveal(places[idx], choice.token_ids[idx], choice.logprobs[idx]) for idx in picked]
