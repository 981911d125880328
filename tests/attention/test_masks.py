"""The visibility rule, stated as properties and checked by brute force over small layouts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.attention.layout import DocumentShape, RowLayout, build_layout
from ar2diff.attention.masks import PAD_DOCUMENT, TokenPlaces, build_visible_mask, causal_places


@st.composite
def layouts(draw) -> RowLayout:
    block_size = draw(st.integers(1, 5))
    num_views = draw(st.integers(1, 2))
    documents = []
    for _ in range(draw(st.integers(1, 3))):
        prompt_len, response_len = draw(st.integers(1, 4)), draw(st.integers(1, 9))
        num_blocks = -(-response_len // block_size)
        bits = draw(st.lists(st.booleans(), min_size=num_blocks * num_views, max_size=num_blocks * num_views))
        views = np.array(bits, dtype=bool).reshape(num_blocks, num_views)
        documents.append(
            DocumentShape(num_tokens=prompt_len + response_len, prompt_len=prompt_len, block_views=views)
        )
    return build_layout(documents, block_size=block_size, clean_attention=draw(st.sampled_from(("causal", "block"))))


def _mask(layout: RowLayout) -> torch.Tensor:
    return build_visible_mask(layout.places, layout.places, clean_attention=layout.clean_attention)


def _allowed(layout: RowLayout, query: int, key: int) -> bool:
    """The rule of the design page, spelled out for one pair."""
    places = layout.places
    document, stream, block, position = (
        x.tolist() for x in (places.document_idx, places.stream_idx, places.block_idx, places.position_idx)
    )
    if document[query] != document[key]:
        return False
    if stream[query] == 0:
        if stream[key] != 0:
            return False
        if position[key] <= position[query]:
            return True
        return layout.clean_attention == "block" and block[query] == block[key] >= 0
    if stream[key] == 0:
        return block[key] < block[query]
    return stream[key] == stream[query] and block[key] == block[query]


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_the_predicate_is_the_stated_rule_for_every_pair(layout):
    mask = _mask(layout)
    size = len(layout)
    assert mask.tolist() == [[_allowed(layout, q, k) for k in range(size)] for q in range(size)]


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_no_noisy_token_and_no_other_document_reaches_a_clean_token_even_through_many_layers(layout):
    reach = _mask(layout).double()
    for _ in range(4):
        reach = ((reach @ reach) > 0).double()
    clean = layout.places.stream_idx == 0
    assert not reach[clean][:, ~clean].any()
    document = layout.places.document_idx
    assert not (reach.bool() & (document[:, None] != document[None])).any()


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_no_token_depends_on_a_later_block_and_every_noisy_token_depends_on_its_whole_block(layout):
    reach = _mask(layout).double()
    for _ in range(4):
        reach = ((reach @ reach) > 0).double()
    block, position = layout.places.block_idx, layout.places.position_idx
    assert not (reach.bool() & (block[None] > block[:, None])).any()
    noisy = layout.places.stream_idx > 0
    if layout.clean_attention == "causal":
        assert not (reach.bool()[~noisy] & (position[None] > position[~noisy][:, None])).any()
    same_view = (layout.places.stream_idx[:, None] == layout.places.stream_idx[None]) & (
        block[:, None] == block[None]
    )
    same = same_view & (layout.places.document_idx[:, None] == layout.places.document_idx[None])
    assert (reach.bool() | ~same)[noisy].all()


def test_padding_sees_only_itself_and_is_seen_by_nobody():
    places = TokenPlaces(
        document_idx=torch.tensor([0, 0, PAD_DOCUMENT, PAD_DOCUMENT]),
        stream_idx=torch.zeros(4, dtype=torch.int64),
        block_idx=torch.tensor([-1, 0, -1, -1]),
        position_idx=torch.tensor([0, 1, 2, 3]),
    )
    mask = build_visible_mask(places, places, clean_attention="causal")
    assert mask[2:].tolist() == [[False, False, True, False], [False, False, False, True]]
    assert not mask[:2, 2:].any()


@pytest.mark.parametrize("length", [1, 5])
def test_a_plain_document_is_the_causal_triangle(length):
    places = causal_places(length)
    mask = build_visible_mask(places, places, clean_attention="causal")
    assert torch.equal(mask, torch.ones(length, length, dtype=torch.bool).tril())
