"""Verified decoding: draft by diffusion, keep what the model's own AR path agrees with.

A cycle starts from an anchor whose keys are not cached yet. Unfused, it costs two forwards: a draft pass over
[anchor, MASK ...] and a verifying pass over [anchor, drafts], strictly causal, whose accepted rows are committed.
Fused, lanes ride along with the verifying pass (TiDAR's way): one group of MASK rows for each of several acceptance
lengths, seeing only the rows that would be accepted; the lane of the length that comes true is the next draft, so
such a cycle costs one forward. A lane's anchor is masked, since it is known only after the pass.
A draft that is copied from what was said before (`engine/copying.py`) costs one forward as well.
"""

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ar2diff.engine.ask import Ask, Group, Steps
from ar2diff.engine.block import Block
from ar2diff.engine.draft_plan import EVEN_COSTS, choose_draft_len, promised_rate
from ar2diff.engine.generation import Pick
from ar2diff.engine.loops import choose_by_policy, reveal_anchor
from ar2diff.engine.session import Session
from ar2diff.engine.verify import AcceptanceLog, accept_greedy, accept_sampled
from ar2diff.errors import GenerationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Drafted tokens after an anchor.

    Attributes:
        probs_NV: what they were drawn from; None where they were determined.
        num_passes: forwards that were spent on them alone.
        log: where to note what is accepted of them.
    """

    token_ids: list[int]
    probs_NV: Tensor | None
    num_passes: int
    log: AcceptanceLog


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
        picks = yield from _accept(session, hidden, draft)
        session.commit(hidden, len(picks))
        draft.log.add(len(draft.token_ids), len(picks) - 1)
        block = session.open_block(len(picks))
        block.num_passes = draft.num_passes
        yield session.settle(block, [block.reveal(idx, pick) for idx, pick in enumerate(picks)])
        anchor = picks[-1].token_id
        draft = yield from _read_lane(session, hidden, len(draft.token_ids) + 1, lanes, len(picks) - 1)


def _accept(session: Session, hidden: Tensor, draft: Draft) -> Generator[Ask, Tensor, list[Pick]]:
    """The accepted drafts and the AR path's token after them, as the AR path sees them."""
    drafts, sampler = draft.token_ids, session.sampler
    first, cycle = len(session.answer.token_ids), session.num_blocks
    places = [(first + idx, cycle) for idx in range(len(drafts) + 1)]
    logits_NV = yield from session.logits(hidden, range(len(places)), [drafts[:idx] for idx in range(len(places))])
    if session.form is not None:
        sampler.forbid(logits_NV, session.form.look_ahead(drafts))
    if sampler.is_greedy:
        ar_ids = logits_NV.argmax(dim=-1).tolist()
        count = accept_greedy(drafts, ar_ids)
        sampler.check_any_left(logits_NV[: count + 1])
        return sampler.describe(logits_NV[: count + 1], ar_ids[: count + 1])
    marks = [sampler.uniform("accept", place) for place in places[:-1]]
    count, weights_V = accept_sampled(drafts, draft.probs_NV, sampler.probabilities(logits_NV), marks)
    sampler.check_any_left(logits_NV[: count + 1])
    after = sampler.draw(weights_V[None], "token", [places[count]]).tolist()
    return sampler.describe(logits_NV[: count + 1], drafts[:count] + after)


def _draft(session: Session, anchor: int) -> Generator[Ask, Tensor, Draft]:
    """A copied draft, or one by forwards of its own: one pass, or `denoising_steps` by the unmasking policy."""
    length = _draft_len(session, 0)
    if session.request.copy_drafts and (copied := _copy(session, length)) is not None:
        return copied
    if length < 1:
        return Draft(token_ids=[], probs_NV=None, num_passes=0, log=session.acceptance)
    if session.request.denoising_steps in (None, 1):
        hidden = yield from session.forward([], [(0, [anchor] + [session.mask_token_id] * length)])
        return (yield from _choose_draft(session, hidden, range(length), 1))
    block = Block(start=0, size=length, wanted=length, is_end=session.answer.is_end)
    while places := block.open_places():
        hidden = yield from session.forward([], [(0, [anchor, *block.input_ids(session.mask_token_id)])])
        logits_NV = yield from session.logits(hidden, places, [block.unsettled_ids()] * len(places))
        picks = session.sampler.choose(logits_NV, [(0, 0)] * len(places), entropy=True, greedy=True)
        for idx in choose_by_policy(session, block, picks):
            block.reveal(places[idx], picks[idx])
    ids = _cut_at_end(session, block.unsettled_ids())
    if session.form is not None:
        ids = ids[: session.form.count_allowed(ids)]
    return Draft(token_ids=ids, probs_NV=None, num_passes=block.num_passes, log=session.acceptance)


def _copy(session: Session, length: int) -> Draft | None:
    """What followed the same tokens before, if that promises more than a draft of `length` tokens by the model."""
    copies, prompt_ids = session.copies, session.request.prompt_ids
    if copies.num_known == 0:
        copies.add(prompt_ids)
    copies.add(session.answer.token_ids[copies.num_known - len(prompt_ids) :])
    found = copies.find(min(session.block_size - 1, _num_left(session, 0) - 1))
    ids = _cut_at_end(session, found.token_ids)
    if session.form is not None:
        ids = ids[: session.form.count_allowed(ids)]
    if not ids:
        return None
    log, costs = copies.logs[found.match_len], session.costs or EVEN_COSTS
    chances = log.chances(len(ids))
    count = choose_draft_len(costs, chances, 0)
    by_model = session.acceptance.chances(length)
    is_better = promised_rate(costs, chances[:count], 0) >= promised_rate(
        costs, by_model, session.request.denoising_steps or 1
    )
    if count == 0 or not is_better:
        log.add(0, 0)  # its bad record fades, so that it is tried again
        return None
    return Draft(token_ids=ids[:count], probs_NV=None, num_passes=0, log=log)


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
    return (yield from _choose_draft(session, hidden, range(first, first + length), 0))


def _draft_len(session: Session, ahead: int) -> int:
    """Tokens to draft once `ahead` more are settled; the AR path gives one more than is drafted."""
    request = session.request
    at_most = min(session.block_size - 1, _num_left(session, ahead) - 1)
    if isinstance(request.draft_len, int):
        at_most = min(at_most, request.draft_len)
    if session.costs is not None:
        chances = session.acceptance.chances(max(0, at_most))
        return choose_draft_len(session.costs, chances, request.denoising_steps or 1)
    return session.acceptance.suggest_len(at_most) if request.adaptive_draft else at_most


def _num_left(session: Session, ahead: int) -> int:
    return session.answer.limit - len(session.answer.token_ids) - ahead


def _choose_draft(session: Session, hidden: Tensor, rows: range, num_passes: int) -> Generator[Ask, Tensor, Draft]:
    logits_NV = yield from session.logits(hidden, rows, [()] * len(rows))
    if session.form is None:
        ids, probs_NV = _pick_drafts(session, logits_NV, 0)
        ids = _cut_at_end(session, ids)
        return Draft(token_ids=ids, probs_NV=probs_NV, num_passes=num_passes, log=session.acceptance)
    form, drafts, probs = session.form.fork(), list[int](), list[Tensor]()
    with suppress(GenerationError):  # a dead end of the form: the AR path may never come here
        for idx in range(len(rows)):
            logits_1V = logits_NV[idx : idx + 1]
            session.sampler.restrict(logits_1V, [form.allowed()])
            ids, probs_1V = _pick_drafts(session, logits_1V, idx)
            drafts += ids
            probs += [probs_1V] if probs_1V is not None else []
            if session.answer.is_end(ids[0]):
                break
            form.advance(ids[0])
    drawn_from = torch.cat(probs) if probs else None
    return Draft(token_ids=drafts, probs_NV=drawn_from, num_passes=num_passes, log=session.acceptance)


def _pick_drafts(session: Session, logits_NV: Tensor, first: int) -> tuple[list[int], Tensor | None]:
    """Drafts for the places from `first` after the anchor on, and what they were drawn from."""
    if session.sampler.is_greedy:
        return logits_NV.argmax(dim=-1).tolist(), None
    probs_NV = session.sampler.probabilities(logits_NV)
    start, cycle = len(session.answer.token_ids) + first, session.num_blocks
    places = [(start + idx, cycle) for idx in range(len(logits_NV))]
    return session.sampler.draw(probs_NV, "draft", places).tolist(), probs_NV


def _cut_at_end(session: Session, ids: list[int]) -> list[int]:
    # Nothing is kept after an end of turn, so nothing is verified there.
    ends = [idx for idx, token_id in enumerate(ids) if session.answer.is_end(token_id)]
    return ids[: ends[0] + 1] if ends else ids
