"""Verified decoding: draft by diffusion, keep what the model's own AR path agrees with.

A cycle starts from an anchor whose keys are not cached yet. Unfused, it costs two forwards: a draft pass over
[anchor, MASK ...] and a verifying pass over [anchor, drafts], strictly causal, whose accepted rows are committed.
Fused, lanes ride along with the verifying pass (TiDAR's way): one group of MASK rows for each of several acceptance
lengths, seeing only the rows that would be accepted; the lane of the length that comes true is the next draft, so
such a cycle costs one forward. A lane's anchor is masked, since it is known only after the pass.
"""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from ar2diff.engine.ask import Ask, Group, Steps
from ar2diff.engine.block import Block
from ar2diff.engine.loops import reveal_anchor, reveal_by_policy
from ar2diff.engine.session import Session
from ar2diff.engine.verify import accept_greedy, accept_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Drafted tokens after an anchor; `probs_NV` is what they were drawn from, None where they were determined."""

    token_ids: list[int]
    probs_NV: Tensor | None
    num_passes: int


def decode_verified(session: Session) -> Steps:
    """The AR mode's answer (its distribution at a temperature above 0), in fewer forwards."""
    pending = yield from session.prefill()
    first = session.open_block(1)
    yield from reveal_anchor(session, first, pending)
    anchor = first.input_ids(session.mask_token_id)[0]
    draft: Draft | None = None
    while not session.answer.is_finished:
        draft = draft or (yield from _draft(session, anchor))
        lanes = _plan_lanes(session, draft)
        hidden = yield from session.forward([anchor, *draft.token_ids], list(lanes.values()))
        tokens, logprobs = yield from _accept(session, hidden, draft)
        session.cache.commit(len(tokens))
        session.acceptance.add(len(draft.token_ids), len(tokens) - 1)
        block = session.open_block(len(tokens))
        block.num_passes = draft.num_passes
        yield session.settle(block, [block.reveal(idx, tokens[idx], logprobs[idx]) for idx in range(len(tokens))])
        anchor = tokens[-1]
        draft = yield from _read_lane(session, hidden, len(draft.token_ids) + 1, lanes, len(tokens) - 1)


def _accept(session: Session, hidden: Tensor, draft: Draft) -> Generator[Ask, Tensor, tuple[list[int], list[float]]]:
    """The accepted drafts and the AR path's token after them, with log p under the AR path."""
    first, cycle = len(session.answer.token_ids), session.num_blocks
    places = [(first + idx, cycle) for idx in range(len(draft.token_ids) + 1)]
    logits_NV = yield from session.logits(hidden, range(len(places)))
    if session.sampler.is_greedy:
        choice = session.sampler.choose(logits_NV, places)
        count = accept_greedy(draft.token_ids, choice.token_ids) + 1
        return choice.token_ids[:count], choice.logprobs[:count]
    marks = [session.sampler.uniform("accept", place) for place in places[:-1]]
    ar_probs_NV = session.sampler.probabilities(logits_NV)
    count, weights_V = accept_sampled(draft.token_ids, draft.probs_NV, ar_probs_NV, marks)
    after = session.sampler.draw(weights_V[None], "token", [places[count]]).tolist()
    tokens = draft.token_ids[:count] + after
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    return tokens, [float(logprobs_NV[idx, token_id]) for idx, token_id in enumerate(tokens)]


def _draft(session: Session, anchor: int) -> Generator[Ask, Tensor, Draft]:
    """A draft by forwards of its own: one pass, or `denoising_steps` of them by the unmasking policy."""
    length = _draft_len(session, 0)
    if length < 1:
        return Draft(token_ids=[], probs_NV=None, num_passes=0)
    if session.request.denoising_steps in (None, 1):
        hidden = yield from session.forward([], [(0, [anchor] + [session.mask_token_id] * length)])
        return _choose_draft(session, (yield from session.logits(hidden, range(length))), 1)
    block = Block(start=0, size=length + 1, wanted=length + 1, is_end=session.answer.is_end)
    block.reveal(0, anchor, 0.0)
    while places := block.open_places():
        hidden = yield from session.forward([], [(0, block.input_ids(session.mask_token_id))])
        logits_NV = yield from session.logits(hidden, [place - 1 for place in places])
        keys = [(0, 0)] * len(places)
        reveal_by_policy(session, block, places, session.sampler.choose(logits_NV, keys, entropy=True, greedy=True))
    ids = [token_id for token_id in block.token_ids[1:] if token_id is not None]
    return Draft(token_ids=_cut_at_end(session, ids), probs_NV=None, num_passes=block.num_passes)


def _plan_lanes(session: Session, draft: Draft) -> dict[int, Group]:
    """For some acceptance lengths, the rows that draft what follows them."""
    lanes: dict[int, Group] = {}
    lens = session.acceptance.likely_lens(len(draft.token_ids), session.request.draft_lanes)
    for accepted in lens:
        length = _draft_len(session, accepted + 1)
        if length >= 1:
            lanes[accepted] = (accepted + 1, [session.mask_token_id] * (length + 1))
    return lanes


def _read_lane(
    session: Session, hidden: Tensor, num_clean: int, lanes: dict[int, Group], accepted: int
) -> Generator[Ask, Tensor, Draft | None]:
    """The draft of the lane whose acceptance length came true, if there was one."""
    if session.answer.is_finished or accepted not in lanes:
        return None
    first = num_clean + sum(len(ids) for length, (_, ids) in lanes.items() if length < accepted)
    length = len(lanes[accepted][1]) - 1
    return _choose_draft(session, (yield from session.logits(hidden, range(first, first + length))), 0)


def _draft_len(session: Session, ahead: int) -> int:
    """Tokens to draft once `ahead` more are settled; the AR path gives one more than is drafted."""
    left = session.answer.limit - len(session.answer.token_ids) - ahead
    at_most = min(session.request.draft_len or session.block_size, session.block_size - 1, left - 1)
    return session.acceptance.suggest_len(at_most) if session.request.adaptive_draft else at_most


def _choose_draft(session: Session, logits_NV: Tensor, num_passes: int) -> Draft:
    if session.sampler.is_greedy:
        ids, probs_NV = logits_NV.argmax(dim=-1).tolist(), None
    else:
        probs_NV = session.sampler.probabilities(logits_NV)
        first, cycle = len(session.answer.token_ids), session.num_blocks
        places = [(first + idx, cycle) for idx in range(len(logits_NV))]
        ids = session.sampler.draw(probs_NV, "draft", places).tolist()
    return Draft(token_ids=_cut_at_end(session, ids), probs_NV=probs_NV, num_passes=num_passes)


def _cut_at_end(session: Session, ids: list[int]) -> list[int]:
    # Nothing is kept after an end of turn, so nothing is verified there.
    ends = [idx for idx, token_id in enumerate(ids) if session.answer.is_end(token_id)]
    return ids[: ends[0] + 1] if ends else ids
