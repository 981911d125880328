"""How much to draft: the length that promises the most tokens a second, by what passes cost and what was accepted.

It steers speed alone: greedy verification gives the AR path's answer whatever was drafted. Free of torch.
"""

from collections.abc import Mapping, Sequence


class PassCosts:
    """Seconds of one forward, head included, by its rows; on straight lines between measured counts.

    Args:
        seconds: by row count, at least two counts; beyond the outermost ones the nearest line goes on.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._points = sorted(seconds.items())

    def of(self, num_rows: int) -> float:
        """Seconds of a forward of this many rows."""
        right = next((i for i, (rows, _) in enumerate(self._points) if rows >= num_rows), len(self._points) - 1)
        (rows_0, seconds_0), (rows_1, seconds_1) = self._points[max(1, right) - 1 : max(1, right) + 1]
        return seconds_0 + (seconds_1 - seconds_0) * (num_rows - rows_0) / (rows_1 - rows_0)


EVEN_COSTS = PassCosts({1: 1.0, 2: 1.0})
"""Every pass costs the same: the plan where a clock must have no part in it."""


def promised_rate(costs: PassCosts, chances: Sequence[float], num_passes: int) -> float:
    """Tokens a second of a cycle that drafts a token for each of `chances` in so many passes at most, then verifies.

    A clock may be too coarse to see a pass, and a line may go on below zero: that promises nothing.
    """
    tokens, chance = 1.0, 1.0
    for step in chances:
        chance *= step
        tokens += chance
    # Every pass of a cycle has the anchor and the whole draft.
    seconds = costs.of(1 + len(chances)) * (1 + min(num_passes, len(chances)))
    return tokens / seconds if seconds > 0 else 0.0


def choose_draft_len(costs: PassCosts, chances: Sequence[float], num_passes: int) -> int:
    """Tokens to draft in the next cycle; 0 where a plain step of the AR path is the better buy.

    Args:
        chances: for each place after the anchor, the chance that it is accepted once all before it were.
        num_passes: drafting passes at most; 0 for a draft that is there already.
    """
    rates = [promised_rate(costs, chances[:length], num_passes) for length in range(len(chances) + 1)]
    return rates.index(max(rates))
