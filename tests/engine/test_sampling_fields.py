"""Every sampling field in every mode: the engine gives the reference's answer, and each field does its work."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request
from ar2diff.engine.sampling import Sampler
from ar2diff.errors import GenerationError, RequestError

MODES = ["diffusion", "verified", "ar"]
PROMPT = (10, 11, 12, 97)


@pytest.fixture(scope="module")
def pairs(kit):
    """Models of every form with their engines, by form."""
    forms = [(True, "causal"), (True, "block"), (False, "causal"), (False, "block")]
    loaded = {form: kit.loaded(shift=form[0], clean=form[1], sharp=1.5) for form in forms}
    return {form: (model, kit.engine(model)) for form, model in loaded.items()}


settings_of_requests = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 1e-6, 0.7, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 1e-9, 0.3, 0.9]),
        "top_k": st.sampled_from([None, 1, 5, 1000]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "presence_penalty": st.sampled_from([0.0, -2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, -2.0, 0.4, 2.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, 261), st.floats(-100, 100, width=32), max_size=4),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "top_logprobs": st.sampled_from([0, 1, 20]),
        "stop": st.sampled_from([(), ("a",), ("\x01", "bc", "é")]),
        "policy": st.sampled_from(["top_k", "threshold", "factor", "entropy", "left_to_right"]),
        "denoising_steps": st.sampled_from([None, 1, 2]),
        "max_tokens": st.integers(1, 11),
    }
)


@given(
    asked=settings_of_requests,
    form=st.sampled_from([(True, "causal"), (True, "block"), (False, "causal"), (False, "block")]),
    mode=st.sampled_from(MODES),
    fused=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_request_gives_the_ids_and_logprobs_of_the_reference(asked, form, mode, fused, pairs):
    form = form if mode == "diffusion" else (True, "causal")
    if mode == "verified":
        asked = {**asked, "temperature": 0.0}
    loaded, engine = pairs[form]
    request = Request(prompt_ids=PROMPT, mode=mode, fused_commit=fused, **asked)
    got, want = engine.generate(request), generate_reference(loaded, request)
    assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)
    for token_id, logprob, top, right in zip(
        got.token_ids, got.logprobs, got.top_logprobs, want.top_logprobs, strict=True
    ):
        assert [value for _, value in top] == pytest.approx([value for _, value in right], abs=1e-3)
        assert len(top) == min(len(right), request.top_logprobs)
        assert all(value >= logprob or idx == token_id for idx, value in top) or len(top) == 20


@given(
    asked=settings_of_requests,
    lanes=st.integers(0, 3),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=6).map(tuple),
)
@settings(max_examples=40, deadline=None)
def test_greedy_verified_answers_are_ar_answers_whatever_changes_the_logits(asked, lanes, prompt, pairs):
    _, engine = pairs[True, "causal"]
    asked = {**asked, "temperature": 0.0, "prompt_ids": prompt, "max_tokens": 16, "block_size": 8}
    ar = engine.generate(Request(mode="ar", **asked))
    verified = engine.generate(Request(mode="verified", draft_lanes=lanes, **asked))
    assert (verified.token_ids, verified.finish_reason) == (ar.token_ids, ar.finish_reason)
    assert verified.logprobs == pytest.approx(ar.logprobs, abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_frequency_penalty_ends_a_loop_and_a_reward_makes_one(kit, mode):
    loaded = kit.loaded()
    asked = {"prompt_ids": PROMPT, "max_tokens": 24, "mode": mode, "logit_bias": {kit.END: -100.0}}
    engine = kit.script(loaded, {}).attach(kit.engine(loaded))  # says "a" for ever
    assert set(engine.generate(Request(**asked)).token_ids) == {ord("a")}
    varied = engine.generate(Request(frequency_penalty=2.0, **asked))
    # 12 above the rest at first: at most 2 x 6 off, and never six times in one pass.
    assert max(map(varied.token_ids.count, varied.token_ids)) < 24
    engine = kit.engine(loaded)
    looped = engine.generate(Request(presence_penalty=-2.0, frequency_penalty=-2.0, **asked))
    plain = engine.generate(Request(**asked))
    assert len(set(looped.token_ids)) < len(set(plain.token_ids))


def sampler(**asked):
    return Sampler(Request(**{"prompt_ids": (0,), "max_tokens": 1, **asked}), [], device=torch.device("cpu"))


def test_penalties_are_those_of_the_public_definitions():
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5], [1.0, -1.0, 2.0, 0.5]])
    got = sampler(presence_penalty=0.5, frequency_penalty=0.25).prepare(logits.clone(), [[2, 2, 3], []])
    torch.testing.assert_close(got, torch.tensor([[1.0, -1.0, 1.0, -0.25], [1.0, -1.0, 2.0, 0.5]]))
    got = sampler(prompt_ids=(1,), repetition_penalty=2.0).prepare(logits.clone(), [[2, 2], []])
    torch.testing.assert_close(got, torch.tensor([[1.0, -2.0, 1.0, 0.5], [1.0, -2.0, 2.0, 0.5]]))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("penalty", [0.5, 1e-40, 2.0])
def test_a_penalty_hides_no_number_that_is_not_finite(value, penalty):
    with pytest.raises(GenerationError, match="finite"):
        sampler(prompt_ids=(1,), repetition_penalty=penalty).prepare(torch.tensor([[1.0, value, 2.0]]), [[]])


def test_min_p_keeps_what_has_that_share_of_the_likeliest_at_the_temperature():
    logits = torch.tensor([[0.5, 0.25, 0.2, 0.05]]).log()
    probs = sampler(temperature=1.0, min_p=0.35).probabilities(logits)[0]
    torch.testing.assert_close(probs, torch.tensor([0.5, 0.25, 0.2, 0.0]).double() / 0.95)
    # At temperature 0.5 the probabilities are squared, and with them the shares.
    probs = sampler(temperature=0.5, min_p=0.2).probabilities(logits)[0]
    torch.testing.assert_close(probs, torch.tensor([0.25, 0.0625, 0.0, 0.0]).double() / 0.3125)
    assert sampler(temperature=1.0, min_p=1.0).probabilities(logits)[0].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_top_logprobs_are_sorted_and_leave_out_what_is_never_emitted():
    request = Request(prompt_ids=(0,), max_tokens=1, top_logprobs=20)
    chosen = Sampler(request, [3], device=torch.device("cpu"))
    [pick] = chosen.choose(chosen.prepare(torch.tensor([[1.0, 3.0, 2.0, 9.0]]), []), [(0, 0)])
    assert [idx for idx, _ in pick.top] == [1, 2, 0]
    assert sum(math.exp(value) for _, value in pick.top) == pytest.approx(1.0)
    assert pick.top[0] == (pick.token_id, pytest.approx(pick.logprob))


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_take_bias_but_no_temperature(kit, mode):
    loaded = kit.loaded()
    engine = kit.script(loaded, {}, confidence={}).attach(kit.engine(loaded))
    asked = {"prompt_ids": PROMPT, "max_tokens": 3, "mode": mode, "top_logprobs": 2}
    # "a" has logit 12 and 258 others 0; MASK and two ids that the tokenizer does not know are never emitted.
    got = engine.generate(Request(temperature=0.1, **asked))
    assert got.logprobs == pytest.approx([12 - math.log(math.exp(12) + 258)] * 3, abs=1e-5)
    got = engine.generate(Request(logit_bias={ord("b"): 12.0}, **asked))
    assert got.logprobs == pytest.approx([12 - math.log(2 * math.exp(12) + 257)] * 3, abs=1e-5)
    assert {idx for idx, _ in got.top_logprobs[0]} == {ord("a"), ord("b")}


@pytest.mark.parametrize("mode", MODES)
def test_steps_hand_over_the_tokens_of_the_answer_with_their_logprobs_in_order(kit, mode):
    engine = kit.engine(kit.loaded())
    request = Request(prompt_ids=PROMPT, max_tokens=13, mode=mode, top_logprobs=3, temperature=1.0)
    steps = list(engine.stream(request))
    settled = [token for step in steps for token in step.settled]
    got = steps[-1].generation
    assert [token.position for token in settled] == list(range(len(got.token_ids)))
    assert tuple(token.token_id for token in settled) == got.token_ids
    assert tuple(token.logprob for token in settled) == got.logprobs
    assert tuple(token.top for token in settled) == got.top_logprobs


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("min_p", [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.inf]),
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, 2.1, math.nan]),
        ("top_logprobs", [-1, 21]),
    ],
)
def test_a_field_out_of_range_is_named(name, values):
    for value in values:
        with pytest.raises(RequestError, match=name):
            Request(**{"prompt_ids": PROMPT, "max_tokens": 1, name: value})
