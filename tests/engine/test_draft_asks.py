"""What verified decoding asks of the model: nothing past the answer's limit, an end of turn or the form's end."""

import pytest

from ar2diff.engine.constraint import Constraint
from ar2diff.engine.request import Request

PROMPT = (10, 11, 12)
DRAFTING = [{}, {"draft_lanes": 1}, {"draft_lanes": 9}, {"denoising_steps": 3}, {"adaptive_draft": True}]


def watch(engine):
    """The asks of all forwards with the length of the prefix that each follows."""
    asks, healthy = [], engine.passes.forward

    def forward(pairs):
        asks.extend((cache.length, ask) for ask, cache in pairs)
        return healthy(pairs)

    engine.passes.forward = forward
    return asks


def decode(kit, *, perfect=True, max_seq_len=64, tokens=None, **asked):
    """The answer of a model whose drafts are always right, or of a random one, and the asks that it took."""
    engine = kit.engine(kit.loaded(max_seq_len=max_seq_len, block_size=8))
    if perfect:
        kit.script(engine.loaded, tokens or {}).attach(engine)
    asks = watch(engine)
    request = Request(prompt_ids=PROMPT, mode="verified", **{"max_tokens": 20, **asked})
    return engine.generate(request), asks


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("perfect", [True, False])
@pytest.mark.parametrize(("max_tokens", "max_seq_len"), [(1, 64), (2, 64), (9, 64), (17, 64), (50, 20), (50, 11)])
def test_no_row_stands_where_no_token_of_the_answer_is_predicted(kit, drafting, perfect, max_tokens, max_seq_len):
    bias = {} if perfect else {kit.END: -100.0}
    asked = {"max_tokens": max_tokens, "max_seq_len": max_seq_len, "logit_bias": bias}
    got, asks = decode(kit, perfect=perfect, **asked, **drafting)
    limit = min(max_tokens, max_seq_len - len(PROMPT))
    assert len(got.token_ids) == limit
    ends = [
        start + max([len(ask.clean), *(seen + len(ids) for seen, ids in ask.groups)])  # one behind the last row
        for start, ask in asks
    ]
    # The last row predicts the last token.
    assert max(ends) <= len(PROMPT) + limit - 1


def test_each_lane_sees_the_anchor_and_the_drafts_whose_acceptance_it_stands_for(kit):
    _, asks = decode(kit, draft_lanes=9, max_tokens=33)
    verifying = [ask for _, ask in asks if len(ask.clean) > 1 and ask.groups]
    assert verifying
    for ask in verifying[:-1]:
        assert [seen for seen, _ in ask.groups] == list(range(1, len(ask.clean) + 1))
        assert all(set(ids) == {kit.MASK} for _, ids in ask.groups)


@pytest.mark.parametrize("constraint", [None, Constraint.regex("a{2,9}")])
@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_nothing_is_verified_behind_an_end_of_turn(kit, constraint, drafting, length):
    ends = dict.fromkeys(range(len(PROMPT) + length, 64), kit.END)
    got, asks = decode(kit, tokens=ends, constraint=constraint, **drafting)
    assert (got.text, got.finish_reason) == ("a" * length, "stop")
    assert all(kit.END not in ask.clean[:-1] for _, ask in asks)


@pytest.mark.parametrize("drafting", DRAFTING)
def test_drafts_keep_to_the_form(kit, drafting):
    constraint = Constraint.regex("([a-c]d|[b-d]a){3,12}")
    engine = kit.engine(kit.loaded(block_size=8))
    form = engine.grammars.compile(constraint)
    asks = watch(engine)
    got = engine.generate(
        Request(prompt_ids=PROMPT, max_tokens=20, mode="verified", constraint=constraint, **drafting)
    )
    verified = 0
    for start, ask in asks:
        if start < len(PROMPT) or not ask.clean:
            continue
        ids = [*got.token_ids[: start - len(PROMPT)], *ask.clean]
        assert form.start().count_allowed(ids) == len(ids)
        verified += len(ask.clean) - 1
    assert verified > 0
