"""The cached engine gives the reference's answers, for every mode, model form and edge of a block."""

import pytest
import torch

from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request

FORMS = [(True, "causal"), (True, "block"), (False, "causal"), (False, "block")]
MODES = ["diffusion", "verified", "ar"]
POLICIES = [
    ("top_k", None, 1),
    ("top_k", None, 2),
    ("threshold", 0.3, None),
    ("factor", 1.4, 3),
    ("entropy", 2.0, None),
    ("left_to_right", None, 2),
]


def prompt(length, seed=0):
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def check_equal(kit, loaded, request, **config):
    engine = kit.engine(loaded, **config)
    got = engine.generate(request)
    grammar = engine.grammars.compile(request.constraint) if request.constraint else None
    want = generate_reference(loaded, request, grammar=grammar)
    assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)
    for top, right in zip(got.top_logprobs, want.top_logprobs, strict=True):
        assert [value for _, value in top] == pytest.approx([value for _, value in right], abs=1e-3)
    return got


@pytest.mark.parametrize(("shift", "clean"), FORMS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 62, 63])
def test_prompts_of_every_length_modulo_the_block_equal_the_reference(kit, shift, clean, length):
    loaded = kit.loaded(shift=shift, clean=clean, sharp=2.0)
    for seed in range(3):
        check_equal(kit, loaded, Request(prompt_ids=prompt(length, seed), max_tokens=13, policy_parameter=0.5))


@pytest.mark.parametrize(("shift", "clean"), FORMS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("policy", "parameter", "steps"), POLICIES)
def test_every_policy_equals_the_reference(kit, shift, clean, fused, policy, parameter, steps):
    loaded = kit.loaded(shift=shift, clean=clean, sharp=2.0)
    for temperature in (0.0, 1.0):
        request = Request(
            prompt_ids=prompt(6),
            max_tokens=14,
            policy=policy,
            policy_parameter=parameter,
            denoising_steps=steps,
            fused_commit=fused,
            temperature=temperature,
            seed=5,
        )
        check_equal(kit, loaded, request)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 8, 9])
def test_max_tokens_is_never_rounded_to_blocks(kit, mode, max_tokens):
    loaded = kit.loaded()
    request = Request(prompt_ids=prompt(5), max_tokens=max_tokens, mode=mode, logit_bias={kit.END: -100.0})
    got = check_equal(kit, loaded, request)
    assert len(got.token_ids) == max_tokens
    assert got.finish_reason == "length"


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("lanes", [0, 1, 2, 9])
@pytest.mark.parametrize("adaptive", [False, True])
def test_greedy_verified_answers_are_the_ar_answers(kit, block_size, lanes, adaptive):
    for seed in range(3):
        loaded = kit.loaded(seed=seed, sharp=1.0)
        with torch.no_grad():
            loaded.decoder.head.weight[kit.END] *= 2.0
        asked = {"prompt_ids": prompt(5, seed), "max_tokens": 21, "block_size": block_size, "stop": ("e", "\x02")}
        ar = check_equal(kit, loaded, Request(mode="ar", **asked))
        verified = check_equal(
            kit, loaded, Request(mode="verified", draft_lanes=lanes, adaptive_draft=adaptive, **asked)
        )
        assert verified.token_ids == ar.token_ids


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("draft_len", [1, 2, 7])
def test_drafting_in_several_passes_changes_no_verified_answer(kit, steps, draft_len):
    loaded = kit.loaded(block_size=8)
    request = Request(
        prompt_ids=prompt(9),
        max_tokens=20,
        mode="verified",
        denoising_steps=steps,
        draft_len=draft_len,
    )
    check_equal(kit, loaded, request)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_block_size_one_is_ar_decoding(kit, temperature):
    loaded = kit.loaded()
    asked = {"prompt_ids": prompt(6), "max_tokens": 15, "temperature": temperature, "seed": 9}
    engine = kit.engine(loaded)
    by_block = engine.generate(Request(block_size=1, **asked))
    assert by_block.token_ids == engine.generate(Request(mode="ar", **asked)).token_ids


@pytest.mark.parametrize("mode", MODES)
def test_the_context_ends_an_answer_with_length(kit, mode):
    loaded = kit.loaded(max_seq_len=16)
    for length in (9, 12, 13, 15):
        got = check_equal(
            kit, loaded, Request(prompt_ids=prompt(length), max_tokens=50, mode=mode, logit_bias={kit.END: -100.0})
        )
        assert got.finish_reason == "length"
        assert len(got.token_ids) == 16 - length


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prefill_in_chunks_changes_nothing(kit, mode, chunk):
    loaded = kit.loaded()
    got = check_equal(kit, loaded, Request(prompt_ids=prompt(10), max_tokens=7, mode=mode), prefill_chunk=chunk)
    assert got.num_prefill_passes == -(-10 // chunk) - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [2, 8])
def test_filling_up_rows_changes_nothing(kit, mode, rows):
    loaded = kit.loaded()
    check_equal(kit, loaded, Request(prompt_ids=prompt(6), max_tokens=11, mode=mode), row_multiple=rows)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_id_in_the_prompt_stays_there(kit, mode):
    loaded = kit.loaded()
    request = Request(prompt_ids=(3, kit.MASK, 5, kit.MASK), max_tokens=9, mode=mode)
    got = check_equal(kit, loaded, request)
    assert kit.MASK not in got.token_ids


def test_an_unconverted_model_decodes_token_by_token(kit):
    loaded = kit.loaded(converted=False)
    check_equal(kit, loaded, Request(prompt_ids=prompt(6), max_tokens=9, mode="ar"))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1e-6},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 20},
        {"logit_bias": {65: 100.0}},
        {"logit_bias": {65: -100.0}},
    ],
)
@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_sampling_settings_equal_the_reference(kit, sampling, mode):
    loaded = kit.loaded()
    check_equal(kit, loaded, Request(prompt_ids=prompt(6), max_tokens=9, mode=mode, seed=3, **sampling))
