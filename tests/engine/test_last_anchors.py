"""Blocks that begin with the last known token: the engine gives the reference's answers, and costs a forward less."""

import pytest
import torch
from test_engine_equals_reference import MODES, POLICIES, check_equal, prompt
from test_gated_adapters import adapt

from ar2diff.engine.request import Request
from ar2diff.errors import ConfigError
from ar2diff.testing.models import tiny_diffusion, tiny_model

BLOCK_SIZE = 4


def last_model(seed=0, *, sharp=2.0, adapted=False):
    diffusion = tiny_diffusion(anchor="last", trained_block_sizes=(2, BLOCK_SIZE))
    loaded = tiny_model(seed, diffusion=diffusion)
    with torch.no_grad():
        loaded.decoder.head_weight.mul_(sharp)
    if adapted:
        adapt(loaded.decoder, seed=seed, size=2.0)
    return loaded


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 62, 63])
def test_prompts_of_every_length_equal_the_reference(kit, length, adapted):
    for seed in range(3):
        loaded = last_model(seed, adapted=adapted)
        check_equal(kit, loaded, Request(prompt_ids=prompt(length, seed), max_tokens=13, policy_parameter=0.5))


@pytest.mark.parametrize(("policy", "parameter", "steps"), POLICIES)
@pytest.mark.parametrize("block_size", [2, BLOCK_SIZE])
def test_every_policy_equals_the_reference(kit, policy, parameter, steps, block_size):
    for temperature in (0.0, 1.0):
        request = Request(
            prompt_ids=prompt(6),
            max_tokens=14,
            block_size=block_size,
            policy=policy,
            policy_parameter=parameter,
            denoising_steps=steps,
            temperature=temperature,
            frequency_penalty=0.5,
            seed=5,
        )
        check_equal(kit, last_model(adapted=True), request)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 7])
def test_limits_and_modes_equal_the_reference(kit, mode, max_tokens):
    request = Request(prompt_ids=prompt(5), max_tokens=max_tokens, mode=mode, logit_bias={kit.END: -100.0})
    got = check_equal(kit, last_model(adapted=True), request)
    assert len(got.token_ids) == max_tokens


def test_requests_that_run_together_get_their_own_answers(kit):
    loaded = last_model(1, adapted=True)
    requests = [Request(prompt_ids=prompt(3 + idx, idx), max_tokens=9 + idx, denoising_steps=2) for idx in range(6)]
    engine = kit.engine(loaded, prefill_chunk=4)
    for request, together in zip(requests, engine.generate_many(requests), strict=True):
        assert together.token_ids == kit.engine(loaded).generate(request).token_ids


@pytest.mark.parametrize("steps", [1, 3])
def test_a_block_costs_its_denoising_passes_and_no_commit(kit, steps):
    asked = {"max_tokens": 12, "denoising_steps": steps, "policy": "top_k", "logit_bias": {kit.END: -100.0}}
    got = kit.engine(last_model()).generate(Request(prompt_ids=prompt(5), **asked))
    assert got.num_forward_passes == steps * 12 // (BLOCK_SIZE - 1)


def test_under_an_adapter_the_first_token_is_the_drafts_and_not_the_parents(kit):
    """What the other anchor cannot do: there the parent says a block's first token."""
    differ = 0
    for seed in range(6):
        asked = {"prompt_ids": prompt(7, seed), "max_tokens": 1}
        drafted = check_equal(kit, last_model(seed, adapted=True), Request(**asked))
        parents = check_equal(kit, last_model(seed, adapted=True), Request(mode="ar", **asked))
        differ += drafted.token_ids != parents.token_ids
    assert differ > 0


@pytest.mark.parametrize(
    "changed", [{"shift_logits": False}, {"clean_attention": "block"}, {"trained_block_sizes": (1, 4)}]
)
def test_settings_without_room_for_it_are_refused(changed):
    with pytest.raises(ConfigError, match="begin with the token before them"):
        tiny_diffusion(**{"anchor": "last", "trained_block_sizes": (4,), **changed})
