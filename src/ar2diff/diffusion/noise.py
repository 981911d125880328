"""How much of each response block a noisy view masks, and which positions: drawn anew each step, never stored.

A schedule turns the noise level t (0 clean, 1 all masked) into a mask rate. Levels are drawn per block and
stratified; the mask of a block is an exact count of positions, or coin flips. Draws are keyed by (run seed, step,
row id), so a resumed run, another number of ranks and an audit draw the same noise.

Shape letters: N blocks, S block, K views.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ar2diff.errors import ConfigError
from ar2diff.seeding import keyed_generator

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_LOWEST_LEVEL = 1e-4
# Row ids step through the unit interval by the golden ratio, which spreads any run of rows evenly.
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


class Schedule(Protocol):
    """A noise schedule: `mask_rate` grows from 0 at t = 0 to 1 at t = 1."""

    def mask_rate(self, t: Floats) -> Floats:
        """The probability that a token is masked at level t."""
        ...

    def level(self, mask_rate: Floats) -> Floats:
        """The level t at which the mask rate is `mask_rate`."""
        ...

    def nelbo_weight(self, t: Floats) -> Floats:
        """mask_rate'(t) / mask_rate(t): the loss so weighted bounds the likelihood (Sahoo et al., 2024)."""
        ...


class Linear:
    """mask_rate(t) = t."""

    def mask_rate(self, t: Floats) -> Floats:
        """See `Schedule`."""
        return t

    def level(self, mask_rate: Floats) -> Floats:
        """See `Schedule`."""
        return mask_rate

    def nelbo_weight(self, t: Floats) -> Floats:
        """1 / t."""
        return 1.0 / t


class Cosine:
    """mask_rate(t) = 1 - cos(pi t / 2): low rates are drawn more often."""

    def mask_rate(self, t: Floats) -> Floats:
        """See `Schedule`."""
        return 1.0 - np.cos(t * (math.pi / 2))

    def level(self, mask_rate: Floats) -> Floats:
        """See `Schedule`."""
        return np.arccos(1.0 - mask_rate) / (math.pi / 2)

    def nelbo_weight(self, t: Floats) -> Floats:
        """(pi / 2) sin(pi t / 2) / (1 - cos(pi t / 2))."""
        angle = t * (math.pi / 2)
        return (math.pi / 2) * np.sin(angle) / (1.0 - np.cos(angle))


SCHEDULES: dict[str, Schedule] = {"linear": Linear(), "cosine": Cosine()}


Draw = Literal["exact", "bernoulli"]
Levels = Literal["block", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig:
    """How noisy views are drawn.

    Attributes:
        num_views: noisy copies of each response block, 1 or 2.
        complementary: view 2 masks exactly what view 1 leaves, so every response token is supervised once. Otherwise
            the second view is drawn for itself, at the antithetic level t_min + t_max - t.
        schedule: a name in `SCHEDULES`.
        t_min, t_max: the range of levels; a clipped one leaves out levels that teach little (Arriola et al., 2025).
        levels: one level for each "block", or for the whole "row".
        draw: "exact" masks a count of positions, at least one a block; "bernoulli" flips a coin for each position.
        position_bias: exact draws take a block's last position exp(position_bias) times as readily as its first, with
            exponential steps between: later tokens are revealed later, as decoding mostly does.
        all_mask_share: share of the blocks in which view 1 masks all but the anchor, as one-pass drafting sees them.
        anchor_mask_rate: how often the anchor of a shifted model is hidden too.
    """

    num_views: int = 2
    complementary: bool = True
    schedule: str = "linear"
    t_min: float = 0.1
    t_max: float = 1.0
    levels: Levels = "block"
    draw: Draw = "exact"
    position_bias: float = 0.0
    all_mask_share: float = 0.0
    anchor_mask_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.num_views not in (1, 2):
            raise ConfigError("num_views is 1 or 2", given=self.num_views)
        if self.complementary and self.num_views != 2:
            raise ConfigError("complementary masks need two views", given=f"num_views = {self.num_views}")
        if self.schedule not in SCHEDULES:
            raise ConfigError("unknown noise schedule", given=self.schedule, fix=f"Use one of {sorted(SCHEDULES)}")
        if not 0.0 < self.t_min <= self.t_max <= 1.0:
            raise ConfigError("noise levels need 0 < t_min <= t_max <= 1", given=f"{self.t_min}, {self.t_max}")
        if self.levels not in ("block", "row"):
            raise ConfigError("levels is block or row", given=self.levels)
        if self.draw not in ("exact", "bernoulli"):
            raise ConfigError("draw is exact or bernoulli", given=self.draw)
        if not math.isfinite(self.position_bias) or (self.position_bias and self.draw != "exact"):
            raise ConfigError("only exact draws have a finite position_bias", given=self.position_bias)
        for name in ("all_mask_share", "anchor_mask_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must lie in [0, 1]", given=getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNoise:
    """The noise of some blocks.

    Attributes:
        masked_NKS: which positions each view masks.
        kept_NK: which views supervise at least one token; the others are left out of the sequence.
        weight_NK: `nelbo_weight` at each view's level.
    """

    masked_NKS: Bools
    kept_NK: Bools
    weight_NK: Floats


def draw_block_noise(
    config: NoiseConfig, supervised_NS: Bools, *, shift_logits: bool, seed: int, step: int, row_id: int
) -> BlockNoise:
    """Draw the noise for all blocks of one row.

    In view 1 of each block exact draws mask at least one supervised position. In the complement, and by coin flips,
    there may be none: then that view of the block is not kept. Complementary views count each token once anyway.

    Args:
        supervised_NS: positions whose token carries a diffusion loss when masked: neither anchor nor filler.
    """
    generator = keyed_generator("noise", seed, step, row_id)
    num_blocks, block_size = supervised_NS.shape
    maskable_NS = np.ones_like(supervised_NS)
    maskable_NS[:, : 1 if shift_logits else 0] = False
    schedule = SCHEDULES[config.schedule]
    level_N = _draw_levels(config, generator, num_blocks, row_id)
    draw = _draw_coins if config.draw == "bernoulli" else partial(_draw_exact, position_bias=config.position_bias)
    all_masked_N = _draw_share(config.all_mask_share, generator, num_blocks, row_id)
    rate_N = np.where(all_masked_N, 1.0, schedule.mask_rate(level_N))
    first = draw(generator, maskable_NS, supervised_NS, rate_N)
    views, rates = [first], [rate_N]
    if config.complementary:
        views.append(maskable_NS & ~first)
        rates.append(1.0 - rate_N)
    elif config.num_views == 2:
        rate_N = schedule.mask_rate(config.t_min + config.t_max - level_N)
        views.append(draw(generator, maskable_NS, supervised_NS, rate_N))
        rates.append(rate_N)
    masked_NKS, rate_NK = np.stack(views, axis=1), np.stack(rates, axis=1)
    kept_NK: Bools = np.any(masked_NKS & supervised_NS[:, None], axis=2)
    if shift_logits and config.anchor_mask_rate:
        masked_NKS[:, :, 0] = generator.random(kept_NK.shape) < config.anchor_mask_rate
    # A complement of (almost) nothing has an unbounded weight; exact counts never mask less than one position, and a
    # shifted model's anchor is none of those they choose from.
    num_maskable = max(block_size - int(shift_logits), 1)
    lowest = 1.0 / num_maskable if config.draw == "exact" else schedule.mask_rate(np.array(_LOWEST_LEVEL))
    level_NK = schedule.level(np.clip(rate_NK, lowest, 1.0))
    return BlockNoise(masked_NKS=masked_NKS, kept_NK=kept_NK, weight_NK=schedule.nelbo_weight(level_NK))


def _draw_levels(config: NoiseConfig, generator: np.random.Generator, count: int, row_id: int) -> Floats:
    # One level from each of `count` equal strata, in random order; rows shift the strata against each other, which
    # spreads the levels over the whole batch without any row knowing the others.
    if config.levels == "row":
        point = (generator.random() + row_id * _GOLDEN) % 1.0
        return np.full(count, config.t_min + (config.t_max - config.t_min) * point)
    offset = (generator.random() / max(count, 1) + row_id * _GOLDEN) % 1.0
    points = (generator.permutation(count) + offset) / max(count, 1)
    return config.t_min + (config.t_max - config.t_min) * points


def _draw_share(share: float, generator: np.random.Generator, count: int, row_id: int) -> Bools:
    offset = (generator.random() + row_id * _GOLDEN) % 1.0
    chosen = np.floor(share * np.arange(1, count + 1) + offset) > np.floor(share * np.arange(count) + offset)
    shuffled: Bools = chosen[generator.permutation(count)]
    return shuffled


def _draw_coins(generator: np.random.Generator, maskable_NS: Bools, supervised_NS: Bools, rate_N: Floats) -> Bools:
    del supervised_NS
    masked: Bools = (generator.random(maskable_NS.shape) < rate_N[:, None]) & maskable_NS
    return masked


def _draw_exact(
    generator: np.random.Generator,
    maskable_NS: Bools,
    supervised_NS: Bools,
    rate_N: Floats,
    *,
    position_bias: float,
) -> Bools:
    # Each block masks floor or ceiling of rate * maskable positions, at least one of them supervised where any is.
    num_maskable_N = maskable_NS.sum(axis=1)
    wanted_N = np.floor(rate_N * num_maskable_N + generator.random(rate_N.shape))
    count_N = np.clip(wanted_N, np.minimum(num_maskable_N, 1), num_maskable_N)
    drawn_NS = generator.random(maskable_NS.shape)
    if position_bias:
        # Exponential arrival times: the first to arrive are a draw without replacement with these odds.
        odds_S = np.exp(position_bias * np.linspace(0.0, 1.0, maskable_NS.shape[1]))
        drawn_NS = -np.log1p(-drawn_NS) / odds_S
    score_NS = np.where(maskable_NS, drawn_NS, np.inf)
    first_supervised_N = np.where(supervised_NS, score_NS, np.inf).argmin(axis=1)
    has_supervised_N = supervised_NS.any(axis=1)
    score_NS[has_supervised_N, first_supervised_N[has_supervised_N]] = -1.0
    rank_NS = score_NS.argsort(axis=1).argsort(axis=1)
    masked: Bools = (rank_NS < count_N[:, None]) & maskable_NS
    return masked
