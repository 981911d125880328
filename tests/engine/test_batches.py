"""Requests that run together: same answers, shared forwards, bounded memory, nobody starved, nothing left behind."""

import threading

import fuzz_batches
import pytest
import torch

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError, ConfigError, GenerationError, RequestError
from ar2diff.testing.models import END_ID, MASK_ID, PAD_ID, always_model, nan_model, tiny_diffusion, tiny_model

SPOILED = 200  # a token whose embedding is not a number


def build(loaded=None, **config):
    loaded = loaded or tiny_model(1, diffusion=tiny_diffusion())
    return Engine(loaded, clock=SystemClock(), config=EngineConfig(**config))


def ask(start=10, length=5, max_tokens=8, **fields):
    prompt = tuple((start + idx) % 199 for idx in range(length))
    return Request(prompt_ids=prompt, max_tokens=max_tokens, logit_bias={END_ID: -100.0}, **fields)


def run(scheduler, steps=10_000):
    """Step until nothing is left; the keys in the order in which they finished, with their ends."""
    ends = {}
    for _ in range(steps):
        for key, result in scheduler.step():
            if isinstance(result, Ar2diffError) or result.generation is not None:
                ends[key] = result if isinstance(result, Ar2diffError) else result.generation
        if not scheduler.num_running and not scheduler.num_waiting:
            break
    return ends


@pytest.mark.parametrize("chunk", range(5))
def test_a_mix_of_requests_gives_the_answers_that_each_gives_alone(chunk):
    assert [fuzz_batches.find_difference(seed) for seed in range(20 * chunk, 20 * chunk + 20)] == [None] * 20


@pytest.mark.parametrize("mode", ["ar", "diffusion", "verified"])
def test_every_step_is_one_forward_however_many_run(mode):
    engine, calls = build(), []
    engine.runner.register_forward_hook(lambda module, args, out: calls.append(len(args[0])))
    alone = engine.generate(ask(mode=mode))
    assert len(calls) == alone.num_forward_passes
    calls.clear()
    together = engine.generate_many([ask(mode=mode)] * 8)
    assert len(calls) == alone.num_forward_passes
    assert [got.token_ids for got in together] == [alone.token_ids] * 8


def test_a_request_whose_numbers_are_not_finite_fails_alone_and_spoils_no_later_user_of_its_memory():
    loaded = tiny_model(1, diffusion=tiny_diffusion(), tied_head=False)
    good = [ask(start, 40, mode=mode) for start in (3, 50) for mode in ("ar", "diffusion", "verified")]
    wanted = [build(loaded).generate(request).token_ids for request in good]
    loaded.decoder.embedding.weight.data[SPOILED] = float("nan")
    bad = Request(prompt_ids=(*good[0].prompt_ids[:33], SPOILED, 5), max_tokens=9, mode="ar")
    engine = build(loaded, kv_tokens=512, prefill_chunk=16)
    for _ in range(3):
        got = engine.generate_many([*good[:3], bad, *good[3:], bad])
        failed = [isinstance(one, GenerationError) for one in got]
        assert failed == [False] * 3 + [True] + [False] * 3 + [True]
        assert [one.token_ids for one in got if not isinstance(one, GenerationError)] == wanted
    assert engine.pages.num_used == 0
    assert torch.isfinite(engine.pages.store.values).all()


@pytest.mark.parametrize("token_id", [MASK_ID, PAD_ID, END_ID])
@pytest.mark.parametrize("mode", ["ar", "diffusion"])
def test_a_model_that_always_says_one_thing_answers_as_the_reference_does(token_id, mode):
    loaded = always_model(token_id, diffusion=tiny_diffusion())
    requests = [Request(prompt_ids=(1, 2, 3), max_tokens=count, mode=mode) for count in (1, 3, 4, 5)]
    for request, got in zip(requests, build(loaded).generate_many(requests), strict=True):
        want = generate_reference(loaded, request)
        assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
        assert MASK_ID not in got.token_ids


def test_a_model_without_numbers_fails_every_request_and_keeps_no_memory():
    engine = build(nan_model(diffusion=tiny_diffusion()))
    assert all(isinstance(got, GenerationError) for got in engine.generate_many([ask()] * 3))
    assert engine.pages.num_used == engine.pages.num_kept == 0


def test_requests_wait_for_memory_and_start_in_the_order_of_arrival():
    engine = build(kv_tokens=128, page_size=32)
    for key in range(6):
        engine.scheduler.add(key, ask(10 * key, 40, 20))
    most, ends = 0, {}
    while len(ends) < 6:
        ends.update((key, got.generation) for key, got in engine.scheduler.step() if got.generation)
        most = max(most, engine.scheduler.num_running)
        assert engine.pages.num_used <= 4
    assert most < 6
    assert list(ends) == sorted(ends)


def test_younger_requests_pause_while_memory_is_short_and_all_finish():
    engine = build(kv_tokens=256)
    requests = [ask(30 * key, 5, 200, mode="ar") for key in range(3)]
    together = engine.generate_many(requests)
    assert [got.token_ids for got in together] == [build().generate(request).token_ids for request in requests]


def test_no_request_waits_while_a_later_one_of_its_size_finishes_twice():
    engine = build(max_running=2)
    waiting, order = list(range(12)), []
    for key in waiting:
        engine.scheduler.add(key, ask(key, 5, 8))
    order = list(run(engine.scheduler))
    assert all(abs(order.index(key) - key) <= 1 for key in waiting)


def test_a_request_that_can_never_fit_is_refused_and_says_what_to_do():
    engine = build(kv_tokens=64)
    with pytest.raises(RequestError, match="never fits"):
        engine.stream(ask(length=60, max_tokens=60))
    engine.scheduler.add("big", ask(length=60, max_tokens=60))
    engine.scheduler.add("small", ask())
    ends = run(engine.scheduler)
    assert isinstance(ends["big"], RequestError)
    assert len(ends["small"].token_ids) == 8


def test_a_long_prompt_is_taken_in_by_chunks_while_others_decode_in_every_step():
    engine = build(prefill_chunk=8)
    engine.scheduler.add("short", ask(length=5, max_tokens=40, mode="ar"))
    engine.scheduler.step()
    engine.scheduler.add("long", ask(start=60, length=120, max_tokens=2, mode="ar"))
    for _ in range(120 // 8 - 1):
        assert [key for key, _ in engine.scheduler.step()] == ["short"]
    assert {key for key, _ in engine.scheduler.step()} == {"short", "long"}


def test_prompts_that_begin_alike_are_taken_in_once_even_while_the_first_one_runs():
    engine = build(prefill_chunk=32)
    first = ask(length=100, max_tokens=30)
    alone = build().generate(first)
    engine.scheduler.add(0, first)
    for _ in range(5):
        engine.scheduler.step()
    engine.scheduler.add(1, first)
    ends = run(engine.scheduler)
    assert [ends[key].num_cached_tokens for key in (0, 1)] == [0, 96]
    assert ends[1].num_prefill_passes == 0
    assert ends[0].token_ids == ends[1].token_ids == alone.token_ids
    longer = Request(prompt_ids=(*first.prompt_ids, *alone.token_ids, 3), max_tokens=5)
    again = engine.generate(longer)
    assert again.num_cached_tokens == 128
    assert again.token_ids == build().generate(longer).token_ids


def test_answers_whose_blocks_see_themselves_are_no_prefix_for_others():
    loaded = tiny_model(1, diffusion=tiny_diffusion(shift_logits=False, clean_attention="block"))
    engine = build(loaded)
    first = engine.generate(ask(length=40, max_tokens=60))
    longer = Request(prompt_ids=(*ask(length=40).prompt_ids, *first.token_ids), max_tokens=5)
    got = engine.generate(longer)
    assert got.num_cached_tokens == 32
    assert got.token_ids == build(loaded).generate(longer).token_ids


def test_kept_prefixes_give_way_and_memory_stays_bounded_over_many_cancelled_requests():
    engine = build(kv_tokens=320)
    size = engine.pages.store.num_bytes
    for key in range(120):
        engine.scheduler.add(key, ask(7 * key, 40, 30))
        engine.scheduler.step()
        if key % 3:
            engine.scheduler.remove(key)
            assert key % 3 != 1 or engine.pages.num_used <= 10
    run(engine.scheduler)
    assert engine.pages.num_used == 0
    assert engine.pages.store.num_bytes == size
    assert len(engine.generate(ask(length=60, max_tokens=100)).token_ids) == 100


def test_leaving_a_stream_frees_its_memory_at_once():
    engine = build()
    stream = engine.stream(ask())
    assert engine.pages.num_used == 0
    next(stream)
    assert engine.pages.num_used > 0
    stream.close()
    assert engine.pages.num_used == 0


def test_streams_read_in_turn_and_threads_share_one_engine():
    engine = build()
    requests = [ask(20 * key, 5, 12, seed=key, temperature=1.0) for key in range(4)]
    wanted = [build().generate(request).text for request in requests]
    streams = [engine.stream(request) for request in requests]
    texts = [""] * 4
    for _ in range(100):
        for idx, stream in enumerate(streams):
            texts[idx] += getattr(next(stream, None), "text", "")
    assert texts == wanted
    got = {}
    threads = [
        threading.Thread(target=lambda key=key: got.update({key: engine.generate(requests[key]).text}))
        for key in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[key] for key in range(4)] == wanted


def test_answers_in_int8_are_the_same_bits_in_any_batch_and_over_scattered_pages(library_dir):
    loaded = tiny_model(1, diffusion=tiny_diffusion())
    config = {"precision": "int8", "library_dir": library_dir, "prefill_chunk": 16}
    requests = [
        ask(start, length, 20, mode=mode)
        for start, length in ((3, 70), (3, 50), (90, 9))
        for mode in ("ar", "diffusion", "verified")
    ]
    alone = [build(loaded, **config).generate(request) for request in requests]
    engine = build(loaded, **config)
    for _ in range(2):
        together = engine.generate_many(requests)
        assert [(got.token_ids, got.logprobs) for got in together] == [(one.token_ids, one.logprobs) for one in alone]
    assert sum(got.num_cached_tokens for got in together) > 0


@pytest.mark.parametrize("given", [{"page_size": 48}, {"max_running": 0}, {"kv_tokens": 0}])
def test_settings_out_of_range_are_refused(given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        EngineConfig(**given)
