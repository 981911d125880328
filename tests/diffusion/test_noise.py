"""What the noise promises about masks, levels and keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.diffusion.corrupt import cut_response
from ar2diff.diffusion.noise import SCHEDULES, NoiseConfig, draw_block_noise
from ar2diff.errors import ConfigError


def _supervised(num_blocks, block_size, num_filler, shift_logits):
    supervised = np.arange(num_blocks * block_size) < num_blocks * block_size - num_filler
    supervised = supervised.reshape(num_blocks, block_size)
    if shift_logits:
        supervised[:, 0] = False
    return supervised


@st.composite
def draws(draw, **fixed):
    block_size = draw(st.integers(1, 9))
    shift_logits = draw(st.booleans())
    num_filler = draw(st.integers(0, block_size - 1))
    supervised = _supervised(draw(st.integers(1, 12)), block_size, num_filler, shift_logits)
    config = NoiseConfig(
        schedule=draw(st.sampled_from(sorted(SCHEDULES))),
        all_mask_share=draw(st.sampled_from((0.0, 0.3, 1.0))),
        t_min=draw(st.sampled_from((0.01, 0.1, 0.9))),
        **fixed,
    )
    noise = draw_block_noise(
        config, supervised, shift_logits=shift_logits, seed=draw(st.integers(0, 99)), step=1, row_id=2
    )
    return supervised, shift_logits, noise


@given(draws())
@settings(max_examples=200, deadline=None)
def test_complementary_views_supervise_every_response_token_exactly_once(case):
    supervised, _, noise = case
    counted = (noise.masked_NKS & noise.kept_NK[:, :, None] & supervised[:, None]).sum(axis=1)
    assert np.array_equal(counted, supervised.astype(int))


@given(draws(complementary=False))
@settings(max_examples=100, deadline=None)
def test_every_kept_view_masks_at_least_one_supervised_token_and_every_block_has_one(case):
    supervised, shift_logits, noise = case
    masks_some = (noise.masked_NKS & supervised[:, None]).any(axis=2)
    assert np.array_equal(masks_some, noise.kept_NK)
    assert np.array_equal(noise.kept_NK.all(axis=1), supervised.any(axis=1))
    if shift_logits:
        assert not noise.masked_NKS[:, :, 0].any()


def test_a_draw_depends_on_its_key_and_on_nothing_else():
    supervised = _supervised(20, 8, 0, True)
    key = {"seed": 1, "step": 2, "row_id": 3}

    def draw(**change):
        return draw_block_noise(NoiseConfig(), supervised, shift_logits=True, **{**key, **change}).masked_NKS

    assert np.array_equal(draw(), draw())
    for change in ({"seed": 9}, {"step": 9}, {"row_id": 9}):
        assert not np.array_equal(draw(), draw(**change))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_share_of_masked_tokens_follows_the_schedule(schedule):
    config = NoiseConfig(num_views=1, complementary=False, schedule=schedule, t_min=0.05)
    supervised = _supervised(200, 16, 0, False)
    rates = [
        draw_block_noise(config, supervised, shift_logits=False, seed=0, step=0, row_id=row).masked_NKS.mean()
        for row in range(20)
    ]
    levels = np.linspace(0.05, 1.0, 10_001)
    assert np.mean(rates) == pytest.approx(SCHEDULES[schedule].mask_rate(levels).mean(), abs=0.01)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_schedule_rises_from_clean_to_masked_and_its_weight_is_its_log_slope(schedule):
    curve = SCHEDULES[schedule]
    levels = np.linspace(0.01, 0.99, 99)
    rates = curve.mask_rate(levels)
    assert curve.mask_rate(np.array([0.0, 1.0])) == pytest.approx([0.0, 1.0])
    assert (np.diff(rates) > 0).all()
    assert curve.level(rates) == pytest.approx(levels)
    slope = (np.log(curve.mask_rate(levels + 1e-6)) - np.log(curve.mask_rate(levels - 1e-6))) / 2e-6
    assert curve.nelbo_weight(levels) == pytest.approx(slope, rel=1e-5)


def test_levels_are_stratified_so_a_rows_mean_rate_hardly_varies():
    config = NoiseConfig(num_views=1, complementary=False, t_min=0.01)
    supervised = _supervised(32, 32, 0, False)
    means = [
        draw_block_noise(config, supervised, shift_logits=False, seed=s, step=0, row_id=0).masked_NKS.mean()
        for s in range(40)
    ]
    assert np.std(means) < 0.015  # independent levels would give about 0.05


def test_all_mask_share_is_the_share_of_blocks_with_everything_but_the_anchor_masked():
    supervised = _supervised(40, 8, 0, True)
    config = NoiseConfig(all_mask_share=0.25, t_max=0.5)
    full = [
        draw_block_noise(config, supervised, shift_logits=True, seed=0, step=0, row_id=row)
        .masked_NKS[:, 0, 1:]
        .all(1)
        for row in range(30)
    ]
    assert np.mean(full) == pytest.approx(0.25, abs=0.01)
    everything = draw_block_noise(
        NoiseConfig(all_mask_share=1.0), supervised, shift_logits=True, seed=0, step=0, row_id=0
    )
    assert not everything.kept_NK[:, 1].any()


def test_anchors_are_hidden_at_their_own_rate():
    supervised = _supervised(400, 4, 0, True)
    config = NoiseConfig(anchor_mask_rate=0.3)
    noise = draw_block_noise(config, supervised, shift_logits=True, seed=0, step=0, row_id=0)
    assert noise.masked_NKS[:, :, 0].mean() == pytest.approx(0.3, abs=0.06)


@pytest.mark.parametrize(
    "setting", [{"num_views": 3}, {"num_views": 1}, {"t_min": 0.0}, {"schedule": "x"}, {"all_mask_share": 1.5}]
)
def test_an_impossible_setting_is_refused(setting):
    with pytest.raises(ConfigError):
        NoiseConfig(**setting)


def test_blocks_start_at_the_first_response_token_and_filler_is_not_supervised():
    blocks = cut_response(np.arange(10, 21), 4, block_size=4, end_token_id=7, shift_logits=True)
    assert blocks.token_ids_NS.tolist() == [[14, 15, 16, 17], [18, 19, 20, 7]]
    assert blocks.supervised_NS.tolist() == [[False, True, True, True], [False, True, True, False]]


def test_the_two_complementary_views_are_weighted_at_rates_that_add_up_to_one():
    config = NoiseConfig(t_min=0.3, t_max=0.7)
    supervised_NS = np.ones((16, 8), dtype=bool)
    noise = draw_block_noise(config, supervised_NS, shift_logits=False, seed=0, step=0, row_id=0)
    # The linear schedule's weight is one over the rate.
    np.testing.assert_allclose((1.0 / noise.weight_NK).sum(axis=1), 1.0)
    assert np.ptp(noise.weight_NK[:, 0]) > 0


@pytest.mark.parametrize(("shift_logits", "num_maskable"), [(False, 8), (True, 7)])
def test_a_complement_of_nothing_weighs_as_one_masked_position(shift_logits, num_maskable):
    config = NoiseConfig(all_mask_share=1.0)
    supervised = _supervised(4, 8, 0, shift_logits)
    noise = draw_block_noise(config, supervised, shift_logits=shift_logits, seed=0, step=0, row_id=0)
    np.testing.assert_allclose(noise.weight_NK, [[1.0, num_maskable]] * 4)


@pytest.mark.parametrize("shift_logits", [False, True])
def test_the_weighted_count_of_an_exact_view_estimates_the_number_of_tokens(shift_logits):
    # Levels below one position of a block still mask one: their weight is that of one position.
    config = NoiseConfig(num_views=1, complementary=False, t_min=0.001)
    supervised = _supervised(3000, 4, 0, shift_logits)
    noise = draw_block_noise(config, supervised, shift_logits=shift_logits, seed=0, step=0, row_id=0)
    weighted = noise.masked_NKS[:, 0] * noise.weight_NK
    assert weighted[supervised].mean() == pytest.approx(1.0, abs=0.02)


def test_two_views_drawn_for_themselves_have_antithetic_levels():
    config = NoiseConfig(complementary=False, t_min=0.2, t_max=0.7)
    noise = draw_block_noise(config, np.ones((16, 8), dtype=bool), shift_logits=False, seed=0, step=0, row_id=0)
    np.testing.assert_allclose((1.0 / noise.weight_NK).sum(axis=1), 0.9)


def test_coin_flips_mask_each_position_at_its_blocks_rate_and_weigh_by_its_level():
    supervised = np.ones((4000, 4), dtype=bool)
    config = NoiseConfig(num_views=1, complementary=False, draw="bernoulli", t_min=0.45, t_max=0.95)
    noise = draw_block_noise(config, supervised, shift_logits=False, seed=0, step=0, row_id=0)
    level_N = 1.0 / noise.weight_NK[:, 0]
    assert 0.45 <= level_N.min() < 0.46
    assert 0.94 < level_N.max() <= 0.95
    assert level_N.mean() == pytest.approx(0.7, abs=1e-3)
    masked = noise.masked_NKS[:, 0]
    for low in (0.45, 0.6, 0.75):
        some = masked[(level_N >= low) & (level_N < low + 0.15)]
        assert some.mean(axis=0) == pytest.approx(np.full(4, low + 0.075), abs=0.06)
    # The weighted count estimates the number of tokens.
    assert (masked * noise.weight_NK[:, :1]).mean() == pytest.approx(1.0, abs=0.03)


def test_coin_flips_too_give_the_second_view_the_rest():
    supervised = np.ones((50, 6), dtype=bool)
    noise = draw_block_noise(NoiseConfig(draw="bernoulli"), supervised, shift_logits=True, seed=0, step=0, row_id=0)
    assert (noise.masked_NKS[:, :, 1:].sum(axis=1) == 1).all()


def test_one_level_holds_for_a_whole_row_and_rows_spread_over_the_range():
    supervised = np.ones((9, 4), dtype=bool)
    config = NoiseConfig(num_views=1, complementary=False, draw="bernoulli", levels="row", t_min=0.2)
    levels = []
    for row_id in range(40):
        noise = draw_block_noise(config, supervised, shift_logits=False, seed=0, step=0, row_id=row_id)
        assert np.ptp(noise.weight_NK) == 0
        levels.append(1.0 / noise.weight_NK[0, 0])
    counts, _ = np.histogram(levels, bins=4, range=(0.2, 1.0))
    assert counts.min() >= 4


@pytest.mark.parametrize("bias", [-1.5, 0.0, 2.0])
def test_a_position_bias_masks_later_positions_more_or_less_often_by_its_odds(bias):
    supervised = np.ones((6000, 4), dtype=bool)
    config = NoiseConfig(num_views=1, complementary=False, t_min=0.25, t_max=0.25, position_bias=bias)
    noise = draw_block_noise(config, supervised, shift_logits=False, seed=0, step=0, row_id=0)
    # At this level one position of a block is masked: its share is its share of the odds.
    odds = np.exp(bias * np.arange(4) / 3)
    assert noise.masked_NKS.sum(axis=2).max() == 1
    assert noise.masked_NKS[:, 0].mean(axis=0) == pytest.approx(odds / odds.sum(), abs=0.02)


@pytest.mark.parametrize(
    "setting",
    [{"draw": "x"}, {"levels": "x"}, {"position_bias": np.inf}, {"position_bias": 1.0, "draw": "bernoulli"}],
)
def test_an_impossible_draw_is_refused(setting):
    with pytest.raises(ConfigError):
        NoiseConfig(**setting)
