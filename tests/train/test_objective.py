"""Presets are what they say, and impossible objectives are refused."""

import pytest

from ar2diff.diffusion.noise import NoiseConfig
from ar2diff.errors import ConfigError
from ar2diff.train.objective import PRESETS, ObjectiveConfig, find_preset

STATED = {
    # name: block sizes, shifted, clean attention, views, complementary, likelihood weights, next-token weight
    "ar2diff": ((8,), True, "causal", 2, True, False, 0.5),
    "draft": ((8,), True, "causal", 2, True, False, 0.5),
    "bd3lm": ((4,), False, "block", 1, False, True, 0.0),
    "dllm": ((32,), False, "block", 1, False, True, 0.0),
    "fast-dllm-v2": ((32,), True, "block", 2, True, False, 0.0),
    "i-dlm": ((2, 3, 4), True, "causal", 1, False, False, 0.2),
    "opdlm": ((4,), False, "block", 1, False, False, 0.0),
    "sdar": ((4,), False, "block", 1, False, True, 0.0),
}


def test_each_preset_sets_what_its_publication_states():
    actual = {
        name: (
            o.block_sizes,
            o.shift_logits,
            o.clean_attention,
            o.noise.num_views,
            o.noise.complementary,
            o.nelbo_weighted,
            o.ar_weight,
        )
        for name, o in PRESETS.items()
    }
    assert actual == STATED
    assert find_preset("draft").noise.all_mask_share == find_preset("i-dlm").noise.all_mask_share == 1.0
    assert find_preset("i-dlm").noise.anchor_mask_rate == 1.0
    assert (find_preset("bd3lm").noise.t_min, find_preset("bd3lm").noise.t_max) == (0.45, 0.95)
    assert find_preset("dllm").noise.levels == "row"
    opdlm = find_preset("opdlm")
    assert (opdlm.diffusion_weight, opdlm.distill_weight, opdlm.distill_top_k) == (0.0, 1.0, None)
    coins = {name for name, objective in PRESETS.items() if objective.noise.draw == "bernoulli"}
    assert coins == {"bd3lm", "dllm", "fast-dllm-v2", "sdar", "opdlm"}


def test_block_growth_gives_each_size_its_share_and_ends_with_the_largest():
    grow = ObjectiveConfig(block_sizes=(1, 2, 4, 8))
    assert [grow.block_size_at(step, step / 8) for step in range(8)] == [1, 1, 2, 2, 4, 4, 8, 8]
    assert grow.block_size_at(8, 1.0) == 8
    mix = ObjectiveConfig(block_sizes=(4, 8), block_schedule="mix")
    assert [mix.block_size_at(step, 0.0) for step in range(4)] == [4, 8, 4, 8]


def test_a_random_block_size_is_drawn_for_each_step_and_the_same_again():
    objective = ObjectiveConfig(block_sizes=(2, 4, 8), block_schedule="random")
    drawn = [objective.block_size_at(step, 0.5, seed=1) for step in range(300)]
    assert drawn == [objective.block_size_at(step, 0.1, seed=1) for step in range(300)]
    assert drawn != [objective.block_size_at(step, 0.5, seed=2) for step in range(300)]
    assert all(70 < drawn.count(size) < 130 for size in (2, 4, 8))


@pytest.mark.parametrize(
    "setting",
    [
        {"block_sizes": ()},
        {"block_sizes": (8, 4)},
        {"clean_attention": "block"},
        {"ar_weight": -1.0},
        {"diffusion_weight": 0.0},
        {"distill_weight": -1.0},
        {"distill_top_k": 0},
        {"block_sizes": (1,), "ar_weight": 0.0},
        {"shift_logits": False, "noise": NoiseConfig(anchor_mask_rate=0.5)},
        {"anchor": "first"},
        {"anchor": "last", "block_sizes": (1, 4)},
        {"anchor": "last", "shift_logits": False},
        {"anchor": "last", "clean_attention": "block", "ar_weight": 0.0},
        {"anchor": "last", "noise": NoiseConfig(anchor_mask_rate=0.5)},
    ],
)
def test_an_impossible_objective_is_refused(setting):
    with pytest.raises(ConfigError):
        ObjectiveConfig(**setting)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match="bd3lm"):
        find_preset("nope")
