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


def choose_draft_len(costs: PassCosts, chances: Sequence[float], num_passes: int) -> int:
    """Tokens to draft in the next cycle; 0 where a plain step of the AR path is the better buy.

    Args:
        chances: for each place after the anchor, the chance that it is accepted once all before it were.
        num_passes: drafting passes at most.
    """
    best_len, best_tokens, best_s = 0, 1.0, costs.of(1)
    tokens, chance = 1.0, 1.0
    for length, step in enumerate(chances, start=1):
        chance *= step
        tokens += chance
        # Every pass of a cycle has the anchor and the whole draft.
        cycle_s = costs.of(1 + length) * (1 + min(num_passes, length))
        # A clock may be too coarse to see a pass, and a line may go on below zero: that promises nothing.
        if cycle_s > 0 and tokens * best_s > best_tokens * cycle_s:
            best_len, best_tokens, best_s = length, tokens, cycle_s
    return best_len
