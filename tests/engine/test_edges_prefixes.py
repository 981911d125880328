"""Kept prefixes and prompt chunks at their edges: never another prompt's values, never a forward too many."""

import pytest
import torch

from ar2diff.attention.kv_cache import KVStore
from ar2diff.clock import SystemClock
from ar2diff.engine.cache import PageTable
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.testing.models import END_ID, tiny_diffusion, tiny_model

PAGE = 32
TWIN = 2**61 - 1  # hash(TWIN) == hash(0)


def build_table(num_pages):
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "softmax_scale": 1.0}
    store = KVStore(num_pages=num_pages, page_size=PAGE, dtype=torch.float32, device=torch.device("cpu"), **shape)
    return PageTable(store)


def leave(table, tokens):
    """A request with these tokens came and went."""
    lease = table.lease(tokens, len(tokens))
    lease.cache.commit(len(tokens) - lease.cache.length)
    table.publish(lease, tokens)
    pages = list(lease.cache.pages)
    table.release(lease)
    return pages


@pytest.mark.parametrize("place", [0, 31, 32, 63])
def test_prompts_whose_hashes_collide_share_nothing_from_where_they_differ(place):
    table = build_table(8)
    tokens = [0] * 65
    forged = [*tokens[:place], TWIN, *tokens[place + 1 :]]
    assert hash(tuple(tokens)) == hash(tuple(forged))
    leave(table, tokens)
    assert table.lease(forged, 65).cache.length == place // PAGE * PAGE


def test_a_page_that_was_given_away_is_no_prefix_any_more():
    table = build_table(2)
    leave(table, [1] * 64)
    assert table.num_kept == 2
    leave(table, [2] * 64)
    lease = table.lease([*[1] * 63, 3], 64)
    assert lease.cache.length == 0


def test_a_prefix_that_two_computed_at_once_is_forgotten_with_the_page_it_is_known_by():
    table, tokens = build_table(6), [1] * 64
    first, second = table.lease(tokens, 64), table.lease(tokens, 64)
    for lease in (first, second):
        lease.cache.commit(64)
        table.publish(lease, tokens)
    table.release(first)
    leave(table, [9] * 128)
    assert table.lease([*tokens, 3], 65).cache.length == 0


def test_the_same_tokens_behind_another_beginning_are_another_prefix():
    table = build_table(8)
    leave(table, [1] * 32 + [2] * 33)
    assert table.lease([2] * 65, 65).cache.length == 0
    assert table.lease([1] * 32 + [2] * 33, 65).cache.length == 64


@pytest.mark.parametrize(("length", "chunk", "num_prefills"), [(1, 64, 0), (64, 64, 0), (65, 64, 1), (240, 64, 3)])
def test_a_prompt_costs_one_forward_a_chunk_however_small_the_block(length, chunk, num_prefills):
    loaded = tiny_model(1, diffusion=tiny_diffusion())
    engine = Engine(loaded, clock=SystemClock(), config=EngineConfig(prefill_chunk=chunk))
    calls = []
    engine.runner.register_forward_hook(lambda *_: calls.append(1))
    bias = {END_ID: -100.0}
    got = engine.generate(Request(prompt_ids=(7,) * length, max_tokens=1, mode="ar", logit_bias=bias))
    assert got.num_prefill_passes == num_prefills
    assert len(calls) == num_prefills + 1


@pytest.mark.parametrize("mode", ["ar", "diffusion", "verified"])
def test_a_cancelled_request_is_in_no_later_forward_and_its_memory_serves_the_next(mode):
    loaded, bias = tiny_model(1, diffusion=tiny_diffusion()), {END_ID: -100.0}
    engine = Engine(loaded, clock=SystemClock(), config=EngineConfig(max_running=1))
    asked = {"max_tokens": 40, "mode": mode, "logit_bias": bias}
    engine.scheduler.add("first", Request(prompt_ids=(1, 2, 3), **asked))
    engine.scheduler.add("second", Request(prompt_ids=(4, 5, 6, 7), **asked))
    for _ in range(3):
        engine.scheduler.step()
    engine.scheduler.remove("first")
    assert engine.pages.num_used == 0
    engine.scheduler.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 0)
    alone = Engine(loaded, clock=SystemClock()).generate(Request(prompt_ids=(4, 5, 6, 7), **asked))
    ends = []
    while engine.scheduler.num_running:
        ends += [(key, step.generation) for key, step in engine.scheduler.step() if step.generation is not None]
    assert [(key, got.token_ids) for key, got in ends] == [("second", alone.token_ids)]
