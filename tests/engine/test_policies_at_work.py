"""What holds of every unmasking policy while the engine decodes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.diffusion.unmask import POLICIES
from ar2diff.engine.constraint import Constraint
from ar2diff.engine.request import Request

PROMPT = (10, 11, 12)


@pytest.fixture(scope="module")
def engines(kit):
    """An engine for each model form."""
    forms = [(True, "causal"), (True, "block"), (False, "causal"), (False, "block")]
    return {form: kit.engine(kit.loaded(shift=form[0], clean=form[1], sharp=1.5)) for form in forms}


requests = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "denoising_steps": st.sampled_from([None, 1, 2, 3]),
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 1.0]),
        "max_tokens": st.integers(1, 14),
        "seed": st.integers(0, 2**32),
        "constraint": st.sampled_from([None, None, Constraint.regex("([a-f]|é){1,12}x")]),
    }
)


@given(asked=requests, shift=st.booleans(), clean=st.sampled_from(["causal", "block"]), fused=st.booleans())
@settings(max_examples=50, deadline=None)
def test_every_pass_reveals_a_token_and_none_twice_and_a_block_ends_in_time(asked, shift, clean, fused, engines):
    engine = engines[shift, clean]
    got = engine.generate(Request(prompt_ids=PROMPT, trace=True, fused_commit=fused, **asked))
    known = {}
    for step in got.passes:
        assert step.reveals
        for token in step.reveals:
            assert token.position not in known
            known[token.position] = token.token_id
        shown = {step.start + idx: token_id for idx, token_id in enumerate(step.token_ids) if token_id is not None}
        assert shown.items() <= known.items()
    steps = asked["denoising_steps"] if asked["constraint"] is None else None
    assert max(got.passes_per_block) <= min(asked["block_size"], steps or asked["block_size"])


@given(asked=requests, clean=st.sampled_from(["causal", "block"]))
@settings(max_examples=40, deadline=None)
def test_a_fused_commit_changes_no_answer_of_an_unshifted_model(asked, clean, engines):
    engine = engines[False, clean]
    one = engine.generate(Request(prompt_ids=PROMPT, **asked))
    other = engine.generate(Request(prompt_ids=PROMPT, fused_commit=True, **asked))
    assert (one.token_ids, one.finish_reason, one.passes_per_block) == (
        other.token_ids,
        other.finish_reason,
        other.passes_per_block,
    )
    assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert other.num_forward_passes <= one.num_forward_passes


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("top_k", "left_to_right")])
def test_a_low_temperature_makes_no_policy_sure_of_itself(kit, policy):
    # 3 against 258 zeros: a probability of 0.07, and an entropy near that of a fair choice.
    loaded = kit.loaded()
    engine = kit.script(loaded, {}, confidence=dict.fromkeys(range(60), 3.0)).attach(kit.engine(loaded))
    asked = {"prompt_ids": PROMPT, "max_tokens": 12, "policy": policy, "top_k": 1}
    passes = {
        temperature: engine.generate(Request(temperature=temperature, **asked)).passes_per_block
        for temperature in (0.0, 1e-6, 0.1, 2.0)
    }
    assert set(passes.values()) == {(3, 3, 3)}
