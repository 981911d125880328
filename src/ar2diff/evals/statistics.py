"""What a difference between two modes is worth, when both answered the same problems."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ar2diff.evals.scores import Answer
from ar2diff.seeding import keyed_generator

NUM_DRAWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Accuracy of a mode minus that of the baseline, over the scored problems that both answered to the end.

    Attributes:
        interval: 95% percentile interval of the paired bootstrap (Efron, 1979); (-1, 1) without pairs.
        num_pairs, num_left_out: problems compared, and those that either of the two did not answer to the end.
        only_mode, only_baseline: problems that one of the two alone has right.
    """

    difference: float
    interval: tuple[float, float]
    num_pairs: int
    num_left_out: int
    only_mode: int
    only_baseline: int

    def as_json(self) -> dict[str, Any]:
        """Plain values for a report."""
        return {**asdict(self), "interval": list(self.interval)}


def compare_answers(answers: Sequence[Answer], mode: str, baseline: str, domain: str) -> Difference:
    """A mode against the baseline in one domain, "all" for every domain; the same every time it is computed."""
    chosen = [answer for answer in answers if domain in (answer.domain, "all") and answer.correct is not None]
    ours, theirs = ({a.problem_id: a for a in chosen if a.mode == name} for name in (mode, baseline))
    shared = sorted(ours.keys() & theirs.keys())
    both = [(ours[name], theirs[name]) for name in shared if _are_complete(ours[name], theirs[name])]
    pairs = [(bool(left.correct), bool(right.correct)) for left, right in both]
    return Difference(
        difference=sum(left - right for left, right in pairs) / len(pairs) if pairs else 0.0,
        interval=_interval([int(left) - int(right) for left, right in pairs], (mode, baseline, domain)),
        num_pairs=len(pairs),
        num_left_out=len(shared) - len(pairs),
        only_mode=sum(left and not right for left, right in pairs),
        only_baseline=sum(right and not left for left, right in pairs),
    )


def _are_complete(left: Answer, right: Answer) -> bool:
    return not (left.is_truncated or right.is_truncated)


def _interval(differences: Sequence[int], key: tuple[str, str, str]) -> tuple[float, float]:
    if not differences:
        return -1.0, 1.0
    counts = np.array([differences.count(value) for value in (-1, 0, 1)])
    # Resampling n problems with replacement draws from their three kinds.
    draws = keyed_generator("bootstrap", *key).multinomial(len(differences), counts / counts.sum(), size=NUM_DRAWS)
    means = (draws[:, 2] - draws[:, 0]) / len(differences)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
