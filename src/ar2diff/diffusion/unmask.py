"""Unmasking policies: which masked tokens of a block a denoising pass reveals.

A policy ranks the masked positions and says how many to reveal; `choose_reveals` adds what holds for all of them:
at least ceil(masked / passes left) tokens a pass, so that a block ends within its `denoising_steps`; only masked
positions; ties to the lowest position. Confidence is the probability of the chosen token under the raw logits,
never divided by a temperature.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

from ar2diff.errors import ConfigError


class Policy(Protocol):
    """A rule for what to reveal; see `choose_reveals`."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy` must be given; otherwise it may be all zeros."""
        ...

    def rank(self, position: int, confidence: float, entropy: float) -> float:
        """The sort key of a masked position: low goes first."""
        ...

    def count(self, confidence: Sequence[float], entropy: Sequence[float]) -> int:
        """How many to reveal, given the values in ranked order; fewer than the minimum is raised to it."""
        ...


class _ByConfidence:
    """Most confident first."""

    needs_entropy: ClassVar[bool] = False

    def rank(self, position: int, confidence: float, entropy: float) -> float:
        """Low for high confidence."""
        del position, entropy
        return -confidence


@dataclass(frozen=True, kw_only=True)
class TopK(_ByConfidence):
    """The ceil(masked / passes left) most confident: a fixed number of passes."""

    def count(self, confidence: Sequence[float], entropy: Sequence[float]) -> int:
        """Nothing beyond the minimum."""
        del confidence, entropy
        return 0


@dataclass(frozen=True, kw_only=True)
class Threshold(_ByConfidence):
    """All whose confidence is above `confidence_threshold` (Fast-dLLM, Wu et al., 2025)."""

    confidence_threshold: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.confidence_threshold <= 1.0:
            raise ConfigError("confidence_threshold must lie in [0, 1]", given=self.confidence_threshold)

    def count(self, confidence: Sequence[float], entropy: Sequence[float]) -> int:
        """The number above the threshold."""
        del entropy
        return sum(c > self.confidence_threshold for c in confidence)


@dataclass(frozen=True, kw_only=True)
class Factor(_ByConfidence):
    """The largest n with (n + 1)(1 - c_n) < factor, c_n the n-th highest confidence (Fast-dLLM, Wu et al., 2025)."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0.0):
            raise ConfigError("factor must be positive and finite", given=self.factor)

    def count(self, confidence: Sequence[float], entropy: Sequence[float]) -> int:
        """The largest such n, or 0."""
        del entropy
        fitting = [n for n, c in enumerate(confidence, start=1) if (n + 1) * (1.0 - c) < self.factor]
        return max(fitting, default=0)


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """Lowest entropy first, while the sum stays within `entropy_bound` nats (Ben-Hamu et al., 2025)."""

    entropy_bound: float = 0.5
    needs_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.entropy_bound) and self.entropy_bound >= 0.0):
            raise ConfigError("entropy_bound must not be negative", given=self.entropy_bound)

    def rank(self, position: int, confidence: float, entropy: float) -> float:
        """Low for low entropy."""
        del position, confidence
        return entropy

    def count(self, confidence: Sequence[float], entropy: Sequence[float]) -> int:
        """The longest prefix whose sum is within the bound."""
        del confidence
        total = 0.0
        for n, value in enumerate(entropy):
            total += value
            if total > self.entropy_bound:
                return n
        return len(entropy)


@dataclass(frozen=True, kw_only=True)
class LeftToRight:
    """The leftmost ceil(masked / passes left): reading order, whatever the confidence."""

    needs_entropy: ClassVar[bool] = False

    def rank(self, position: int, confidence: float, entropy: float) -> float:
        """Low for positions to the left."""
        del confidence, entropy
        return float(position)

    def count(self, confidence: Sequence[float], entropy: Sequence[float]) -> int:
        """Nothing beyond the minimum."""
        del confidence, entropy
        return 0


POLICIES: dict[str, type[TopK | Threshold | Factor | Entropy | LeftToRight]] = {
    "top_k": TopK,
    "threshold": Threshold,
    "factor": Factor,
    "entropy": Entropy,
    "left_to_right": LeftToRight,
}


def build_policy(name: str, parameter: float | None = None) -> Policy:
    """The policy called `name`; `parameter` sets its one number, None keeps the policy's default.

    Raises:
        ConfigError: the name is unknown, or the parameter is out of range or not one the policy has.
    """
    if name not in POLICIES:
        raise ConfigError("unknown unmasking policy", given=name, fix=f"Choose one of {', '.join(POLICIES)}")
    kind = POLICIES[name]
    if parameter is None:
        return kind()
    names = [field.name for field in fields(kind)]
    if not names:
        raise ConfigError(f"the policy {name} takes no parameter", given=parameter)
    return kind(**{names[0]: parameter})


def choose_reveals(
    policy: Policy,
    *,
    confidence: Sequence[float],
    entropy: Sequence[float],
    masked: Sequence[bool],
    passes_left: int,
) -> list[int]:
    """The positions to reveal in this pass, ascending; empty only where nothing is masked.

    Args:
        confidence, entropy: one value a position of the block; those of revealed positions are not looked at.
        masked: True where a position may be revealed.
        passes_left: passes of this block still allowed, this one included; at least 1.
    """
    assert passes_left >= 1
    places = [idx for idx, is_masked in enumerate(masked) if is_masked]
    places.sort(key=lambda idx: (policy.rank(idx, confidence[idx], entropy[idx]), idx))
    count = policy.count([confidence[idx] for idx in places], [entropy[idx] for idx in places])
    return sorted(places[: max(count, math.ceil(len(places) / passes_left))])
