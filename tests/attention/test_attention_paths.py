"""Every attention path equals the written-out reference under the same mask, gradients included."""

import numpy as np
import pytest
import torch

from ar2diff.attention.flex import build_mask_mod, flex_attend
from ar2diff.attention.layout import DocumentShape, build_layout, build_tiles
from ar2diff.attention.masks import build_visible_mask
from ar2diff.attention.ops import attend_reference, attend_sdpa, causal_attend, masked_attend
from ar2diff.attention.tiled import tiled_attend


def _layout(clean_attention="causal", block_size=4):
    rng = np.random.default_rng(0)
    documents = []
    for num_tokens, prompt_len in ((19, 5), (3, 2), (40, 11)):
        num_blocks = -(-(num_tokens - prompt_len) // block_size)
        views = rng.random((num_blocks, 2)) < 0.7
        documents.append(DocumentShape(num_tokens=num_tokens, prompt_len=prompt_len, block_views=views))
    return build_layout(documents, block_size=block_size, clean_attention=clean_attention)


def _qkv(length, seed=0):
    torch.manual_seed(seed)
    shapes = ((1, length, 6, 8), (1, length, 2, 8), (1, length, 2, 8))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def _dense(layout):
    return build_visible_mask(layout.places, layout.places, clean_attention=layout.clean_attention)


@pytest.mark.parametrize("clean_attention", ["causal", "block"])
@pytest.mark.parametrize("tile_size", [3, 16, 1000])
def test_tiles_equal_the_dense_mask_in_values_and_gradients(clean_attention, tile_size):
    layout = _layout(clean_attention)
    inputs = _qkv(len(layout))
    probe = torch.randn(1, len(layout), 6, 8)
    results = []
    for attend in (masked_attend(_dense(layout), 0.3), tiled_attend(layout, 0.3, tile_size=tile_size)):
        out = attend(0, *inputs)
        results.append((out, *torch.autograd.grad((out * probe).sum(), inputs)))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("clean_attention", ["causal", "block"])
def test_tiles_hold_every_visible_pair_exactly_once(clean_attention):
    layout = _layout(clean_attention)
    seen = torch.zeros(len(layout), len(layout), dtype=torch.int64)
    for tile in build_tiles(layout, tile_size=8):
        keys = [*range(tile.context.start, tile.context.stop), *range(tile.own.start, tile.own.stop)]
        seen[tile.queries, keys[: tile.num_open]] += 1
        seen[tile.queries, keys[tile.num_open :]] += tile.mask_TM.long()
    assert torch.equal(seen, _dense(layout).long())


def test_masks_grow_with_the_length_and_not_with_its_square():
    sizes = []
    for length in (1000, 2000):
        views = np.ones((length // 8, 2), dtype=bool)
        document = DocumentShape(num_tokens=length + 30, prompt_len=30, block_views=views)
        layout = build_layout([document], block_size=8, clean_attention="causal")
        sizes.append(sum(tile.mask_TM.numel() for tile in build_tiles(layout, tile_size=64)))
    assert sizes[1] < 2.1 * sizes[0]


def test_sdpa_equals_the_reference_with_grouped_queries():
    q, k, v = _qkv(12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    expected = attend_reference(q, k, v, mask, 0.4)
    torch.testing.assert_close(attend_sdpa(q, k, v, mask, 0.4), expected)
    torch.testing.assert_close(causal_attend(0.4)(0, q, k, v), expected)
    everything = attend_reference(q, k, v, torch.ones(12, 12, dtype=torch.bool), 0.4)
    torch.testing.assert_close(attend_sdpa(q, k, v, None, 0.4), everything)


def test_the_flex_mask_is_the_same_predicate():
    layout = _layout()
    mask_mod = build_mask_mod(layout, torch.device("cpu"))
    index = torch.arange(len(layout))
    zero = torch.tensor(0)
    over_keys = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    dense = torch.vmap(over_keys, in_dims=(None, None, 0, None))(zero, zero, index, index)
    assert torch.equal(dense, _dense(layout))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_the_reference():
    layout = _layout("block")
    q, k, v = (x.detach() for x in _qkv(len(layout)))
    out = flex_attend(layout, 0.3, device=torch.device("cpu"), compiled=False)(0, q, k, v)
    torch.testing.assert_close(out, attend_reference(q, k, v, _dense(layout), 0.3), atol=2e-5, rtol=1e-5)
