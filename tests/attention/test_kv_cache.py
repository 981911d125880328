"""Claims about the KV cache of one sequence."""

import pytest
import torch

from ar2diff.attention.kv_cache import KVCache
from ar2diff.attention.ops import attend_reference
from ar2diff.errors import ContextOverflowError

H, K, D, SCALE = 6, 2, 8, 0.3


def build_cache(capacity=32, num_layers=2, dtype=torch.float32):
    return KVCache(
        num_layers=num_layers,
        num_kv_heads=K,
        head_dim=D,
        softmax_scale=SCALE,
        capacity=capacity,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def draw(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, heads, D, generator=generator) for heads in (H, K, K)]


@pytest.mark.parametrize("kind", ["causal", "bidirectional", "random"])
@pytest.mark.parametrize("length", [1, 5])
def test_attention_over_prefix_and_new_tokens_equals_the_written_out_softmax(kind, length):
    cache = build_cache()
    _, k0, v0 = draw(7, 1)
    q, k, v = draw(length, 2)
    among = {
        "causal": torch.ones(length, length).tril().bool(),
        "bidirectional": torch.ones(length, length).bool(),
        "random": torch.rand(length, length, generator=torch.Generator().manual_seed(0)) > 0.5,
    }[kind]
    cache.attend_with(None)(1, draw(7, 1)[0], k0, v0)
    cache.commit(7)
    got = cache.attend_with(None if kind == "bidirectional" else among)(1, q, k, v)
    mask = torch.cat((torch.ones(length, 7).bool(), among), dim=1)
    wanted = attend_reference(q, torch.cat((k0, k), 1), torch.cat((v0, v), 1), mask, SCALE)
    torch.testing.assert_close(got, wanted)


def test_staged_tokens_are_forgotten_unless_committed():
    cache = build_cache()
    first, second, query = draw(4, 1), draw(4, 2), draw(2, 3)
    cache.attend_with(None)(0, *first)
    assert cache.length == 0
    cache.attend_with(None)(0, *second)
    cache.commit(3)
    got = cache.attend_with(None)(0, *query)
    fresh = build_cache()
    fresh.attend_with(None)(0, *second)
    fresh.commit(3)
    assert torch.equal(got, fresh.attend_with(None)(0, *query))
    assert cache.length == 3


def test_truncating_goes_back_to_the_earlier_prefix():
    cache = build_cache()
    cache.attend_with(None)(0, *draw(4, 1))
    cache.commit(4)
    before = cache.attend_with(None)(0, *draw(2, 3))
    cache.attend_with(None)(0, *draw(5, 2))
    cache.commit(5)
    cache.truncate(4)
    assert torch.equal(cache.attend_with(None)(0, *draw(2, 3)), before)


def test_a_full_cache_is_a_clear_error():
    cache = build_cache(capacity=4)
    with pytest.raises(ContextOverflowError, match="5 tokens for 4 places"):
        cache.attend_with(None)(0, *draw(5, 1))


def test_more_than_the_capacity_cannot_be_committed():
    with pytest.raises(AssertionError):
        build_cache(capacity=4).commit(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", [1, 31, 300, 508])
def test_a_token_gets_the_same_bits_whatever_stands_behind_it_in_its_pass(dtype, prefix):
    cache = build_cache(capacity=600, dtype=dtype)
    cache.attend_with(None)(0, *(x.to(dtype) for x in draw(prefix, 1)))
    cache.commit(prefix)
    new = [x.to(dtype) for x in draw(12, 2)]
    causal = torch.ones(12, 12).tril().bool()
    whole = cache.attend_with(causal)(0, *new)
    assert not whole.isnan().any()
    if dtype == torch.bfloat16:
        for count in range(1, 12):
            part = cache.attend_with(causal[:count, :count])(0, *(x[:, :count] for x in new))
            assert torch.equal(part, whole[:, :count])
