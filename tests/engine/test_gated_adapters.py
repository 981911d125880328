"""A mask-gated adapter decodes as it was trained: noisy rows are updated, clean rows are the parent's bits."""

import native_kit as kit
import pytest
import torch

from ar2diff.attention.ops import causal_attend
from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request
from ar2diff.engine.runner import Runner
from ar2diff.models.adapters import TARGETS, AdapterConfig, GatedAdapter
from ar2diff.models.loading import load_model, save_model
from ar2diff.testing.models import MASK_ID, tiny_diffusion, tiny_model

PROMPT = tuple(range(60, 75))
TARGET_SETS = [TARGETS, ("v_proj", "up_proj"), ("k_proj", "o_proj", "down_proj")]


def adapt(decoder, *, mask_token_id=MASK_ID, seed=0, rank=3, targets=TARGETS, size=0.5):
    config = AdapterConfig(rank=rank, alpha=2.0 * rank, targets=targets)
    adapter = GatedAdapter(decoder, config, mask_token_id=mask_token_id, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter.parameters().values():
        parameter.data.normal_(std=size * parameter.shape[1] ** -0.5, generator=generator)
    return adapter


def adapted_model(seed=0, **settings):
    loaded = tiny_model(seed, diffusion=tiny_diffusion())
    adapt(loaded.decoder, seed=seed, **settings)
    return loaded


def build_engine(loaded, precision, library_dir):
    config = EngineConfig(precision=precision, library_dir=library_dir, num_threads=2)
    return Engine(loaded, clock=SystemClock(), config=config)


@pytest.mark.parametrize("targets", TARGET_SETS)
@pytest.mark.parametrize("gate", ["mixed", "none", "all"])
def test_the_runner_equals_the_gated_decoder(targets, gate):
    decoder = kit.build_decoder(qkv_bias=True, mlp_bias=True)
    adapter = adapt(decoder, mask_token_id=4, targets=targets)
    ids, gate_L = torch.arange(9), torch.full((9,), gate == "all")
    if gate == "mixed":
        gate_L[4:7] = True
    attend = causal_attend(decoder.config.softmax_scale)
    with torch.inference_mode():
        with adapter.gated(gate_L[None]):
            wanted = decoder(ids[None], ids[None], attend)[0]
        runner = Runner(decoder)
        runner.reserve(9)
        torch.testing.assert_close(runner(ids, ids, attend, gate_L), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", ["loaded", "int8"])
@pytest.mark.parametrize("seed", range(4))
def test_ar_and_verified_answers_of_an_adapted_model_are_the_parents(precision, seed, library_dir):
    parent = build_engine(tiny_model(seed, diffusion=tiny_diffusion()), precision, library_dir)
    adapted = build_engine(adapted_model(seed), precision, library_dir)
    wanted = parent.generate(Request(prompt_ids=PROMPT, max_tokens=24, mode="ar"))
    got = adapted.generate(Request(prompt_ids=PROMPT, max_tokens=24, mode="ar"))
    assert got.token_ids == wanted.token_ids
    assert got.logprobs == wanted.logprobs
    for extra in ({}, {"draft_lanes": 2}, {"denoising_steps": 2}):
        verified = adapted.generate(Request(prompt_ids=PROMPT, max_tokens=24, mode="verified", **extra))
        assert verified.token_ids == wanted.token_ids
        assert precision == "loaded" or verified.logprobs == wanted.logprobs


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_diffusion_with_an_adapter_is_the_references(seed, fused):
    loaded = adapted_model(seed, size=2.0)
    request = Request(prompt_ids=PROMPT, max_tokens=19, fused_commit=fused, denoising_steps=2)
    engine = Engine(loaded, clock=SystemClock())
    got = engine.generate(request)
    want = generate_reference(loaded, request)
    assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)


def test_the_adapter_changes_what_is_drafted():
    request = Request(prompt_ids=PROMPT, max_tokens=19, denoising_steps=1)
    parent = Engine(tiny_model(0, diffusion=tiny_diffusion()), clock=SystemClock())
    adapted = Engine(adapted_model(0, size=2.0), clock=SystemClock())
    assert adapted.generate(request).token_ids != parent.generate(request).token_ids


@pytest.mark.parametrize("targets", TARGET_SETS)
@pytest.mark.parametrize("rank", [3, 40])
@pytest.mark.parametrize("portable", [False, True])
def test_native_clean_rows_keep_every_bit_beside_gated_rows(library_dir, targets, rank, portable):
    """Rows 0 to 4 are clean; the gated rows behind them are not seen by them and come close to the decoder's."""
    parent = kit.build_runner(kit.build_decoder(mlp_bias=True), library_dir, num_threads=2, portable=portable)
    decoder = kit.build_decoder(mlp_bias=True)
    adapter = adapt(decoder, mask_token_id=4, rank=rank, targets=targets)
    runner = kit.build_runner(decoder, library_dir, num_threads=2, portable=portable)
    ids, positions, gate_L = torch.arange(13), torch.arange(13), torch.arange(13) >= 5
    mask = kit.causal_mask(13)
    hidden = runner(ids, positions, kit.build_cache(runner.config).attend_with(mask), gate_L)
    clean = parent(ids[:5], positions[:5], kit.build_cache(parent.config).attend_with(kit.causal_mask(5)))
    assert torch.equal(hidden[:5].contiguous().view(torch.int32), clean.contiguous().view(torch.int32))
    with adapter.gated(gate_L[None]):
        wanted = decoder(ids[None], positions[None], kit.build_cache(decoder.config).attend_with(mask))[0]
    divergence = _divergence(decoder.logits(wanted[5:]).detach(), runner.logits(hidden[5:]))
    ungated = runner(ids, positions, kit.build_cache(runner.config).attend_with(mask))
    assert divergence < 0.003
    assert _divergence(decoder.logits(wanted[5:]).detach(), runner.logits(ungated[5:])) > 3 * divergence


def _divergence(wanted, got):
    wanted, got = wanted.log_softmax(dim=-1), got.log_softmax(dim=-1)
    return float((wanted.exp() * (wanted - got)).sum(dim=-1).mean())


def test_an_adapter_in_a_folder_decodes(tmp_path):
    loaded = adapted_model(1)
    save_model(tmp_path, loaded, loaded.diffusion)
    request = Request(prompt_ids=PROMPT, max_tokens=12)
    stored = Engine(load_model(tmp_path), clock=SystemClock()).generate(request)
    assert stored.token_ids == Engine(loaded, clock=SystemClock()).generate(request).token_ids
