"""What an answer costs in forwards of the model, counted by a hook."""

import pytest

from ar2diff.engine.request import Request

PROMPT = (10, 11, 12)


def count(kit, *, shift=True, perfect=False, **asked):
    """(answer, forwards seen by the hook) of a model whose drafts are always right, or of a random one."""
    loaded = kit.loaded(shift=shift, sharp=2.0)
    engine = kit.engine(loaded, prefill_chunk=2)
    if perfect:
        kit.script(loaded, {}).attach(engine)
    calls = []
    engine.runner.register_forward_hook(lambda *_: calls.append(1))
    bias = {} if perfect else {kit.END: -100.0}
    got = engine.generate(Request(prompt_ids=PROMPT, logit_bias=bias, **{"max_tokens": 16, **asked}))
    assert len(calls) == got.num_forward_passes + got.num_prefill_passes
    assert got.num_prefill_passes == 1
    return got


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("shift", [True, False])
def test_a_block_of_s_passes_costs_s_and_one_forwards_and_s_with_fused_commit(kit, steps, shift):
    asked = {"policy": "top_k", "denoising_steps": steps, "shift": shift}
    plain, fused = count(kit, **asked), count(kit, fused_commit=True, **asked)
    assert plain.num_forward_passes == 4 * (steps + 1)
    assert fused.num_forward_passes == 4 * steps
    assert plain.passes_per_block == fused.passes_per_block == (steps,) * 4


def test_ar_mode_costs_one_forward_a_token(kit):
    got = count(kit, mode="ar")
    assert got.num_forward_passes == 16
    assert got.tokens_per_forward == 1.0


def test_verified_mode_costs_two_forwards_a_cycle_and_one_with_lanes(kit):
    plain = count(kit, perfect=True, mode="verified", max_tokens=17)
    fused = count(kit, perfect=True, mode="verified", max_tokens=17, draft_lanes=1)
    assert plain.num_forward_passes == 1 + 2 * 4  # the prompt, then four cycles of four tokens
    assert fused.num_forward_passes == 1 + 1 + 4  # the prompt, one draft, then four cycles
    assert plain.accepted_per_cycle == 3.0
    assert plain.accepted_by_offset == plain.drafted_by_offset == (4, 4, 4)


def test_ar_answers_report_no_acceptance(kit):
    assert count(kit, mode="ar").accepted_per_cycle == 0.0


def test_lanes_never_cost_more_forwards_than_a_draft_of_its_own(kit):
    plain = count(kit, mode="verified", max_tokens=40)
    every = count(kit, mode="verified", max_tokens=40, draft_lanes=9)
    assert plain.token_ids == every.token_ids
    assert every.num_forward_passes <= plain.num_forward_passes
