"""The engine in int8: verified answers are the AR answers, forwards are counted, bad numbers are noticed."""

import dataclasses

import pytest
import torch

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.errors import ContextOverflowError, GenerationError
from ar2diff.testing.models import nan_model, tiny_diffusion, tiny_model


@pytest.fixture
def build(library_dir):
    def build_engine(loaded, **settings):
        config = EngineConfig(precision="int8", library_dir=library_dir, num_threads=2, **settings)
        return Engine(loaded, clock=SystemClock(), config=config)

    return build_engine


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("extra", [{}, {"draft_lanes": 2}, {"denoising_steps": 2}])
def test_verified_answers_are_the_ar_answers(build, seed, extra):
    engine = build(tiny_model(seed, diffusion=tiny_diffusion()), prefill_chunk=7)
    prompt = tuple(range(60, 60 + 5 * seed + 1))
    ar = engine.generate(Request(prompt_ids=prompt, max_tokens=40, mode="ar"))
    verified = engine.generate(Request(prompt_ids=prompt, max_tokens=40, mode="verified", **extra))
    assert verified.token_ids == ar.token_ids
    assert verified.logprobs == ar.logprobs


def test_an_ar_pass_is_one_row_and_every_forward_is_counted(build):
    engine, rows = build(tiny_model(0, diffusion=tiny_diffusion())), []
    engine.runner.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    generation = engine.generate(Request(prompt_ids=(1, 2, 3), max_tokens=6, mode="ar"))
    assert rows == [3, 1, 1, 1, 1, 1]
    assert generation.num_forward_passes == 6


def test_diffusion_decodes_and_says_what_it_computes_in(build):
    engine = build(tiny_model(1, diffusion=tiny_diffusion()))
    generation = engine.generate(Request(prompt_ids=(5, 6, 7), max_tokens=11))
    assert 1 <= len(generation.token_ids) <= 11
    assert engine.precision_reason == "int8: asked for"


def test_a_model_whose_numbers_are_not_finite_is_noticed(build):
    with pytest.raises(GenerationError):
        build(nan_model()).generate(Request(prompt_ids=(1,), max_tokens=2, mode="ar"))
    loaded = tiny_model(0)
    loaded.decoder.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    with pytest.raises(GenerationError):
        build(loaded).generate(Request(prompt_ids=(1,), max_tokens=2, mode="ar"))


def test_a_full_cache_is_an_error_before_anything_is_written(build):
    engine = build(tiny_model(0))
    cache_config = dataclasses.replace(engine.loaded.config, max_seq_len=8)
    with pytest.raises(ContextOverflowError):
        engine.runner(torch.arange(40), torch.arange(40), _small_cache(cache_config).attend_with(None))


def _small_cache(config):
    import native_kit

    return native_kit.build_cache(config, capacity=32)
