"""The fast path of canonical JSON writes the same bytes as the RFC 8785 library."""

import math

import pytest
import rfc8785
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ar2diff.hashing import _is_plain, canonical_json

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
# Keys that tempt the two sort orders to differ, beside ordinary ones.
keys = st.text(st.sampled_from("ab_\ufffd\U0001f600"), max_size=3)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(keys, v, max_size=4), max_leaves=8)


@given(values)
@settings(max_examples=150, deadline=None)
@example({"\ufffd": 1, "\U0001f600": 2, "a": [0.5, 1.0, -0.0, 1e-5, 1e16, 1e22, 123456789012345.6]})
@example(['\x7f\x1f\u2028\\"/', 1e15, 1e15 + 0.5, 0.0001, 0.00011])
def test_both_paths_agree(value):
    assert canonical_json(value) == rfc8785.dumps(value)


@given(st.floats(1e-4, 1e15) | st.floats(-1e15, -1e-4))
@settings(max_examples=300, deadline=None)
def test_ordinary_numbers_agree(number):
    assert canonical_json(number) == rfc8785.dumps(number)


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**53, [-(2**53)], {"a": math.nan}])
def test_numbers_without_one_text_are_refused(value):
    with pytest.raises(rfc8785.CanonicalizationError):
        canonical_json(value)


def test_an_event_as_training_writes_it_takes_the_fast_path():
    assert _is_plain(
        {"seq": 3, "prev": "0" * 64, "data": {"loss": 1.25, "ids": [1, 2], "final": False, "note": None}}
    )
