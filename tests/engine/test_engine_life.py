"""Faults, reproducibility, streaming and results of the engine."""

import math
from datetime import UTC, datetime

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.errors import ConfigError, ContextOverflowError, GenerationError, RequestError

MODES = ["diffusion", "verified", "ar"]
PROMPT = (10, 11, 12)


class CountingClock:
    def __init__(self):
        self.now = 0.0

    def utc(self):
        return datetime(2000, 1, 1, tzinfo=UTC)

    def seconds(self):
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_fail_the_request_and_not_the_engine(kit, mode, value):
    engine = kit.engine(kit.loaded())
    request = Request(prompt_ids=PROMPT, max_tokens=6, mode=mode)
    before = engine.generate(request)
    healthy = engine.runner.logits
    calls = []

    def broken(hidden):
        calls.append(1)
        logits = healthy(hidden)
        return torch.full_like(logits, value) if len(calls) > 1 else logits

    engine.runner.logits = broken
    with pytest.raises(GenerationError, match="finite"):
        engine.generate(request)
    engine.runner.logits = healthy
    assert engine.generate(request).token_ids == before.token_ids


def test_a_prompt_that_fills_the_context_is_refused_before_any_forward(kit):
    engine = kit.engine(kit.loaded(max_seq_len=16))
    calls = []
    engine.runner.register_forward_hook(lambda *_: calls.append(1))
    for length in (16, 17):
        with pytest.raises(ContextOverflowError, match="16 tokens"):
            engine.stream(Request(prompt_ids=(5,) * length, max_tokens=1))
    assert not calls


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_gives_the_same_answer_again_and_another_seed_another(kit, mode):
    engine = kit.engine(kit.loaded())
    asked = {"prompt_ids": PROMPT, "max_tokens": 12, "mode": mode, "temperature": 1.0}
    first, again, other = (engine.generate(Request(seed=seed, **asked)) for seed in (1, 1, 2))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [{"temperature": 1.0, "top_p": 1e-9}, {"temperature": 2.0, "top_k": 1}])
def test_sampling_from_one_token_is_greedy(kit, mode, sampling):
    engine = kit.engine(kit.loaded())
    asked = {"prompt_ids": PROMPT, "max_tokens": 12, "mode": mode}
    assert engine.generate(Request(**asked, **sampling)).token_ids == engine.generate(Request(**asked)).token_ids


@pytest.mark.parametrize("mode", MODES)
def test_stream_and_generate_give_the_same_answer_and_a_trace_on_request(kit, mode):
    engine = kit.engine(kit.loaded())
    asked = {"prompt_ids": PROMPT, "max_tokens": 12, "mode": mode}
    steps = list(engine.stream(Request(trace=True, **asked)))
    got = engine.generate(Request(**asked))
    last = steps[-1].generation
    assert (last.token_ids, last.text, got.passes) == (got.token_ids, got.text, ())
    assert len(last.passes) == len(steps)
    assert "".join(step.text for step in steps) == got.text
    revealed = {reveal.position: reveal for step in steps for reveal in step.reveals}
    assert [revealed[idx].token_id for idx in range(len(got.token_ids))] == list(got.token_ids)
    assert [revealed[idx].logprob for idx in range(len(got.token_ids))] == list(last.logprobs)


@pytest.mark.parametrize("mode", MODES)
def test_revealed_tokens_never_change_and_steps_are_numbered(kit, mode):
    engine = kit.engine(kit.loaded())
    known, seen = {}, []
    for step in engine.stream(Request(prompt_ids=PROMPT, max_tokens=12, mode=mode)):
        seen.append((step.block_idx, step.pass_idx))
        for place, token_id in enumerate(step.token_ids):
            if token_id is not None:
                assert known.setdefault(step.start + place, token_id) == token_id
    assert seen == sorted(set(seen))


def test_leaving_a_stream_early_leaves_the_engine_usable_and_gradients_on(kit):
    engine = kit.engine(kit.loaded())
    request = Request(prompt_ids=PROMPT, max_tokens=12)
    stream = engine.stream(request)
    next(stream)
    assert not torch.is_inference_mode_enabled()
    stream.close()
    assert engine.generate(request).finish_reason == "length"


def test_timings_come_from_the_given_clock(kit):
    got = Engine(kit.loaded(), clock=CountingClock()).generate(Request(prompt_ids=PROMPT, max_tokens=3))
    assert (got.prefill_s, got.decode_s) == (1.0, 1.0)


def test_ids_beyond_the_tokenizer_and_forbidden_ids_are_never_emitted(kit):
    loaded = kit.loaded(converted=False)
    with torch.no_grad():
        loaded.decoder.head.weight[260:] *= 100
        loaded.decoder.head.weight[65] *= 100
    got = kit.engine(loaded, never_emit_ids=(65,)).generate(Request(prompt_ids=PROMPT, max_tokens=20, mode="ar"))
    assert all(idx < 260 and idx != 65 for idx in got.token_ids)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"prompt_ids": ()}, "empty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"mode": "fast"}, "mode"),
        ({"block_size": 0}, "block_size"),
        ({"denoising_steps": 0}, "denoising_steps"),
        ({"top_k": 0}, "top_k"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ("a",) * 17}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"logit_bias": {1: math.inf}}, "logit_bias"),
        ({"draft_len": 0}, "draft_len"),
        ({"draft_lanes": -1}, "draft_lanes"),
        ({"policy": "best"}, "policy"),
        ({"policy_parameter": 3.0}, "threshold"),
    ],
)
def test_a_request_out_of_range_names_the_field(asked, problem):
    with pytest.raises(RequestError, match=problem):
        Request(**{"prompt_ids": PROMPT, "max_tokens": 5, **asked})


@pytest.mark.parametrize(
    ("form", "asked", "problem"),
    [
        ({}, {"prompt_ids": (262,)}, "token ids"),
        ({}, {"prompt_ids": (-1,)}, "token ids"),
        ({}, {"logit_bias": {262: 1.0}}, "token ids"),
        ({}, {"block_size": 3}, "block_size"),
        ({"converted": False}, {}, "not converted"),
        ({"converted": False}, {"mode": "verified"}, "not converted"),
        ({"shift": False}, {"mode": "ar"}, "shifted"),
        ({"clean": "block"}, {"mode": "verified"}, "causal"),
    ],
)
def test_a_request_the_model_cannot_serve_is_refused(kit, form, asked, problem):
    engine = kit.engine(kit.loaded(**form))
    with pytest.raises(RequestError, match=problem):
        engine.stream(Request(**{"prompt_ids": PROMPT, "max_tokens": 5, **asked}))


def test_engine_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="prefill_chunk"):
        EngineConfig(prefill_chunk=0)
    with pytest.raises(ConfigError, match="row_multiple"):
        EngineConfig(row_multiple=0)


@given(seed=st.integers(0, 10**6), length=st.integers(1, 9), max_tokens=st.integers(1, 20), lanes=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_verified_equals_ar_for_any_prompt(seed, length, max_tokens, lanes, verified_pair):
    generator = torch.Generator().manual_seed(seed)
    prompt = tuple(torch.randint(0, 256, (length,), generator=generator).tolist())
    asked = {"prompt_ids": prompt, "max_tokens": max_tokens}
    ar = verified_pair.generate(Request(mode="ar", **asked))
    verified = verified_pair.generate(
        Request(mode="verified", draft_lanes=lanes, adaptive_draft=seed % 2 == 0, **asked)
    )
    assert (verified.token_ids, verified.finish_reason) == (ar.token_ids, ar.finish_reason)


@pytest.fixture(scope="module")
def verified_pair(kit):
    return kit.engine(kit.loaded(block_size=8))


@pytest.mark.parametrize("lanes", [0, 2])
def test_verified_equals_ar_bit_for_bit_in_bf16_in_equal_row_shapes(kit, lanes):
    loaded = kit.loaded(block_size=8)
    loaded.decoder = loaded.decoder.to(torch.bfloat16)
    engine = kit.engine(loaded)
    for seed in range(4):
        prompt = tuple(torch.randint(0, 256, (6,), generator=torch.Generator().manual_seed(seed)).tolist())
        ar = engine.generate(Request(prompt_ids=prompt, max_tokens=24, mode="ar"))
        got = engine.generate(Request(prompt_ids=prompt, max_tokens=24, mode="verified", draft_lanes=lanes))
        assert (got.token_ids, got.logprobs) == (ar.token_ids, ar.logprobs)
