"""Claims about the unmasking policies."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.diffusion.unmask import POLICIES, build_policy, choose_reveals
from ar2diff.errors import ConfigError

PARAMETERS = {"top_k": None, "threshold": 0.7, "factor": 1.5, "entropy": 0.8, "left_to_right": None}
unit = st.floats(0.0, 1.0)


@st.composite
def blocks(draw):
    size = draw(st.integers(1, 12))
    floats = st.lists(unit, min_size=size, max_size=size)
    masked = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return draw(floats), draw(floats), masked, draw(st.integers(1, 16))


@pytest.mark.parametrize("name", POLICIES)
@given(block=blocks())
@settings(max_examples=60, deadline=None)
def test_every_policy_reveals_at_least_one_masked_token_and_never_a_revealed_one(name, block):
    confidence, entropy, masked, passes_left = block
    policy = build_policy(name, PARAMETERS[name])
    reveals = choose_reveals(policy, confidence=confidence, entropy=entropy, masked=masked, passes_left=passes_left)
    assert all(masked[idx] for idx in reveals)
    assert reveals == sorted(set(reveals))
    assert len(reveals) >= math.ceil(sum(masked) / passes_left)
    assert bool(reveals) == any(masked)


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data(), size=st.integers(1, 12), steps=st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_every_policy_ends_within_its_steps_and_within_the_block_size(name, data, size, steps):
    policy, masked, passes = build_policy(name, PARAMETERS[name]), [True] * size, 0
    while any(masked):
        values = data.draw(st.lists(unit, min_size=size, max_size=size))
        for idx in choose_reveals(
            policy, confidence=values, entropy=values, masked=masked, passes_left=max(1, steps - passes)
        ):
            masked[idx] = False
        passes += 1
    assert passes <= min(size, steps)


@pytest.mark.parametrize("name", POLICIES)
def test_ties_go_to_the_lowest_position(name):
    policy = build_policy(name)
    flat = {"confidence": [0.2] * 4, "entropy": [1.0] * 4}
    assert choose_reveals(policy, **flat, masked=[False, True, True, True], passes_left=3) == [1]


def reveal(name, parameter, confidence, *, entropy=None, masked=None, passes_left=99):
    return choose_reveals(
        build_policy(name, parameter),
        confidence=confidence,
        entropy=entropy or [0.0] * len(confidence),
        masked=masked or [True] * len(confidence),
        passes_left=passes_left,
    )


def test_top_k_reveals_the_ceiling_of_masked_over_passes_left():
    assert reveal("top_k", None, [0.1, 0.9, 0.5, 0.3, 0.8], passes_left=2) == [1, 2, 4]


def test_threshold_reveals_all_above_it_and_not_what_equals_it():
    assert reveal("threshold", 0.5, [0.5, 0.6, 0.4, 0.51]) == [1, 3]


def test_factor_reveals_the_largest_n_that_fits():
    # 2(1-.99)=.02, 3(1-.9)=.3, 4(1-.85)=.6, 5(1-.2)=4
    assert reveal("factor", 0.5, [0.2, 0.85, 0.9, 0.99]) == [2, 3]
    assert reveal("factor", 0.7, [0.2, 0.85, 0.9, 0.99]) == [1, 2, 3]


def test_entropy_reveals_the_surest_within_the_summed_bound():
    assert reveal("entropy", 0.5, [0.5] * 4, entropy=[0.3, 0.1, 2.0, 0.1]) == [0, 1, 3]
    assert reveal("entropy", 0.5, [0.5] * 2, entropy=[0.1, 0.1]) == [0, 1]


def test_left_to_right_ignores_confidence():
    assert reveal("left_to_right", None, [0.1, 0.9, 0.9], masked=[True, False, True]) == [0]


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("greedy", None),
        ("top_k", 2.0),
        ("left_to_right", 0.1),
        ("threshold", 1.1),
        ("threshold", -0.1),
        ("threshold", math.nan),
        ("factor", 0.0),
        ("factor", math.inf),
        ("entropy", -1.0),
        ("entropy", math.nan),
    ],
)
def test_unknown_policies_and_parameters_out_of_range_are_refused(name, parameter):
    with pytest.raises(ConfigError):
        build_policy(name, parameter)
