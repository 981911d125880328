"""Passes of fixed shapes equal the plain ones, whatever they are filled up with; on a GPU they are recorded."""

import dataclasses

import native_kit as kit
import pytest
import torch

from ar2diff.attention.kv_cache import JoinedAttend, KVStore, PagedCache
from ar2diff.clock import SystemClock
from ar2diff.engine.engine import Engine
from ar2diff.engine.graphs import GraphRunner, choose_shape
from ar2diff.engine.passes import PassRunner
from ar2diff.engine.request import Request
from ar2diff.engine.runner import Runner
from ar2diff.testing.models import tiny_diffusion, tiny_model

PAGES = ((4, 1), (0, 2, 3), (7, 5))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def open_caches(config, lengths, device):
    sizes = {name: getattr(config, name) for name in ("num_layers", "num_kv_heads", "head_dim", "softmax_scale")}
    store = KVStore(**sizes, num_pages=8, page_size=32, dtype=torch.float32, device=torch.device(device))
    generator = torch.Generator().manual_seed(0)
    for kept in (store.keys, store.values):
        kept.copy_(torch.randn(kept.shape, generator=generator))
    return [PagedCache(store, pages, length=length) for pages, length in zip(PAGES, lengths, strict=False)]


def run_pass(runner, lengths, sizes, *, causal, device):
    """Hidden states of one pass over some sequences, and the store afterwards."""
    caches = open_caches(runner.config, lengths, device)
    runner.reserve(256)
    masks = [
        torch.ones(size, size, dtype=torch.bool, device=device).tril() if c else None
        for size, c in zip(sizes, causal, strict=True)
    ]
    parts = [(size, cache.attend_with(mask)) for size, cache, mask in zip(sizes, caches, masks, strict=False)]
    ids = torch.arange(sum(sizes), device=device) * 7 % 75
    positions = torch.cat([torch.arange(n, n + size) for n, size in zip(lengths, sizes, strict=False)]).to(device)
    with torch.inference_mode():
        hidden = runner(ids, positions, parts[0][1] if len(parts) == 1 else JoinedAttend(parts))
    return hidden, caches[0].store


CASES = [
    ((0,), (1,), (True,)),
    ((31,), (8,), (False,)),
    ((33, 95 - 8), (3, 8), (True, False)),
    ((20, 40, 5), (8, 1, 5), (False, True, True)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "sizes", "causal"), CASES)
def test_a_pass_of_a_fixed_shape_is_the_plain_pass(lengths, sizes, causal, device):
    decoder = kit.build_decoder(qk_norm="head", qkv_bias=True).to(device)
    fixed, plain = GraphRunner(decoder), Runner(decoder)
    wanted, wanted_store = run_pass(plain, lengths, sizes, causal=causal, device=device)
    for _ in range(3):  # the third is a replay of a recorded pass
        got, store = run_pass(fixed, lengths, sizes, causal=causal, device=device)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(store.keys, wanted_store.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(store.values, wanted_store.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_one_shape_serves_passes_of_other_contents(device):
    decoder = kit.build_decoder().to(device)
    fixed, plain = GraphRunner(decoder), Runner(decoder)
    for lengths, sizes, causal in (((9, 50), (5, 7), (True, False)), ((31, 2), (8, 8), (False, False))):
        caches_of = []
        for runner in (fixed, plain):
            caches_of.append(run_pass(runner, lengths, sizes, causal=causal, device=device)[0])
        torch.testing.assert_close(*caches_of, atol=1e-4, rtol=1e-4)


def test_shapes_are_few_and_wide_passes_have_none():
    caches = open_caches(kit.build_decoder().config, (20, 40, 5), "cpu")

    def shape_of(sizes):
        return choose_shape([(size, cache.attend_with(None)) for size, cache in zip(sizes, caches, strict=False)])

    assert shape_of((8, 1, 5)) == shape_of((7, 2, 5)) == (16, 4, 8, 256)
    assert shape_of((1,)) == (1, 1, 1, 256)
    assert shape_of((257,)) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["ar", "verified", "diffusion"])
def test_an_engine_answers_the_same_with_fixed_shapes(mode, device):
    loaded = tiny_model(3, diffusion=tiny_diffusion())
    loaded = dataclasses.replace(loaded, decoder=loaded.decoder.to(device))
    requests = [Request(prompt_ids=tuple(range(60, 60 + n)), max_tokens=20, mode=mode) for n in (5, 33, 64)]
    plain, fixed = (Engine(loaded, clock=SystemClock()) for _ in range(2))
    for engine, kind in ((plain, Runner), (fixed, GraphRunner)):
        engine.runner = kind(loaded.decoder)
        engine.runner.reserve(256)
        engine.passes._runner = engine.runner
    got = [answer.token_ids for answer in fixed.generate_many(requests)]
    assert got == [answer.token_ids for answer in plain.generate_many(requests)]
    assert fixed.runner._recorded
    assert isinstance(fixed.passes, PassRunner)
