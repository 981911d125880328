"""Kept prefixes and prompt chunks at their edges: never another prompt's values, never a forward too many."""

import random

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


def test_a_prompt_that_reads_no_known_page_still_waits_until_all_can_finish():
    table, shared = build_table(32), [1] * 64
    first = table.lease([*shared, 2], 448)
    first.cache.commit(64)
    table.publish(first, shared)
    second = table.lease([*shared, 3], 448)
    assert second.cache.pages[:2] == first.cache.pages[:2]
    # What two share is nobody's to give back while both run, so 30 pages are the most that a third may count on.
    assert table.lease([7] * 40, 32 * PAGE, reuse=False) is None
    assert table.grow(first, 448)
    assert table.grow(second, 448)
    table.release(first)
    assert table.lease([7] * 40, 32 * PAGE, reuse=False) is not None


class Tenant:
    """A request of the mix below: what it will hold, and its lease."""

    def __init__(self, draw, table):
        start = [draw.choice([0, 0, 0, 1])] * draw.choice([10, 32, 33, 64, 65])
        prompt = start + [draw.choice([0, 1]) for _ in range(draw.randint(1, 70))]
        self.tokens = prompt + [draw.choice([0, 1]) for _ in range(draw.randint(1, 80))]
        self.fits = table.count_pages(len(self.tokens)) <= table.store.num_pages
        self.lease = table.lease(prompt, len(self.tokens), reuse=draw.random() < 0.8) if self.fits else None

    def pages(self):
        """Its full pages with all tokens up to their ends."""
        cache = self.lease.cache
        return {page: self.tokens[: (idx + 1) * PAGE] for idx, page in enumerate(cache.pages[: cache.length // PAGE])}


def step(draw, table, tenants, written):
    """One random event: an arrival, a growth, an end."""
    kind = draw.random()
    if kind < 0.3:
        tenant = Tenant(draw, table)
        if tenant.lease is not None:
            assert {page: written[page] for page in tenant.pages()} == tenant.pages()
            tenants.append(tenant)
    elif kind < 0.8 and tenants:
        tenant = draw.choice(tenants)
        cache = tenant.lease.cache
        length = min(len(tenant.tokens), cache.length + draw.randint(1, 40))
        if table.grow(tenant.lease, length):
            cache.commit(length - cache.length)
            written.update(tenant.pages())
            table.publish(tenant.lease, tenant.tokens[:length])
        else:
            assert tenant is not tenants[0], "the oldest never waits"
    elif tenants:
        table.release(tenants.pop(draw.randrange(len(tenants))).lease, is_spoiled=draw.random() < 0.2)


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_leases_shares_only_equal_prefixes_and_can_always_finish_in_order(seed):
    draw = random.Random(seed)
    table, tenants, written = build_table(draw.randint(3, 14)), [], {}
    for _ in range(250):
        step(draw, table, tenants, written)
        held = {page for tenant in tenants for page in tenant.lease.cache.pages}
        assert table.num_used == len(held)
    while tenants:
        assert table.grow(tenants[0].lease, len(tenants[0].tokens))
        table.release(tenants.pop(0).lease)
    assert table.num_used == 0
