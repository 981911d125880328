"""The results of `ablation.py` compared problem by problem: what each setting bought over the one it comes after.

Differences are of sums over the same problems; their intervals are 95% of bootstrap resamples of the problems. They
say how sure a difference is for this training run, not how it would vary with another seed of the training.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

NUM_RESAMPLES = 4000
Pair = tuple[float, float]


def masked_share(masks: str, count: str, size: int, *, first: int = 0) -> Callable[[dict[str, Any]], Pair]:
    """A count of `OffsetScores` over its tokens, at the places `first` to `size` - 1 of a block alone."""
    return lambda item: (sum(item[masks][count][first:size]), sum(item[masks]["num_tokens"][first:size]))


def draft_length(item: dict[str, Any]) -> Pair:
    """Tokens drafted right without a gap after the anchor, over blocks with an anchor."""
    scores = item["all_masked"]
    return sum(scores["num_unbroken"][1:]), scores["num_tokens"][0]


def ar_bits(item: dict[str, Any]) -> Pair:
    """Bits over tokens."""
    return item["ar_bits"] * item["num_tokens"], item["num_tokens"]


def parent_bits(result: dict[str, Any], domain: str) -> float | None:
    """AR bits a token of the base as it is."""
    return value([ar_bits(item) for item in result["scored"] if item["domain"] == domain])


def correct(answer: dict[str, Any]) -> Pair:
    """Right answers over answers."""
    return float(answer["correct"]), 1.0


def tokens_per_forward(answer: dict[str, Any]) -> Pair:
    """Tokens over forwards."""
    return answer["num_tokens"], answer["num_forward_passes"]


def measures(size: int) -> dict[str, tuple[str, Callable[[dict[str, Any]], Pair]]]:
    """What is compared: the measure's name to the list it is counted over and how.

    Args:
        size: the smaller block size of the two.
    """
    return {
        "all-masked accuracy": ("scored", masked_share("all_masked", "num_right", size)),
        # A shifted model is given the first token and predicts the next one as an AR model would: only the places
        # behind them compare like with like.
        "all-masked accuracy, places 2+": ("scored", masked_share("all_masked", "num_right", size, first=2)),
        "all-masked nats, places 2+": ("scored", masked_share("all_masked", "nats", size, first=2)),
        "some-masked accuracy, places 2+": ("scored", masked_share("some_masked", "num_right", size, first=2)),
        "some-masked nats, places 2+": ("scored", masked_share("some_masked", "nats", size, first=2)),
        "draft tokens right": ("scored", draft_length),
        "AR bits": ("scored", ar_bits),
        "AR right": ("ar", correct),
        "steps=8 right": ("diffusion", correct),
        "verified tokens per forward": ("verified", tokens_per_forward),
    }


LOWER_IS_BETTER = ("all-masked nats, places 2+", "some-masked nats, places 2+", "AR bits")
PER_CENT = ("accuracy", "accuracy, places 2+", "AR right", "steps=8 right")
NUM_SCORED_MEASURES = 7


def items_of(result: dict[str, Any], kind: str, domain: str) -> list[dict[str, Any]]:
    """The scored references of a domain, or a mode's answers; none where the setting has none."""
    if kind == "scored":
        return [item for item in result["scored"] if item["domain"] == domain and "all_masked" in item]
    return result["answers"].get(kind, [])


def block_size(result: dict[str, Any]) -> int:
    """The largest trained one."""
    return result["config"]["objective"]["block_sizes"][-1]


def value(pairs: Sequence[Pair]) -> float | None:
    """A ratio of sums."""
    top, bottom = np.asarray(pairs, dtype=float).reshape(-1, 2).sum(axis=0)
    return float(top / bottom) if bottom else None


def difference(ours: Sequence[Pair], before: Sequence[Pair]) -> tuple[float, float, float]:
    """The difference of two ratios over the same problems, and its 95% bootstrap interval."""
    both = np.stack([np.asarray(ours, dtype=float), np.asarray(before, dtype=float)])
    chosen = np.random.default_rng(0).integers(0, both.shape[1], (NUM_RESAMPLES, both.shape[1]))
    sums = both[:, chosen].sum(axis=2)
    resampled = sums[0, :, 0] / sums[0, :, 1] - sums[1, :, 0] / sums[1, :, 1]
    point = both.sum(axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(point[0, 0] / point[0, 1] - point[1, 0] / point[1, 1]), float(low), float(high)


def compare(result: dict[str, Any], before: dict[str, Any], domain: str) -> dict[str, tuple[float, float, float]]:
    """Every measure that both settings have."""
    found = {}
    for name, (kind, count) in measures(min(block_size(result), block_size(before))).items():
        ours, theirs = items_of(result, kind, domain), items_of(before, kind, domain)
        if ours and [item["id"] for item in ours] == [item["id"] for item in theirs]:
            found[name] = difference([count(item) for item in ours], [count(item) for item in theirs])
    return found


def format_value(name: str, number: float | None) -> str:
    """A cell."""
    if number is None:
        return "-"
    return f"{number:.0%}" if name.endswith(PER_CENT) else f"{number:.2f}"


def table(results: Sequence[dict[str, Any]], domain: str) -> str:
    """All settings in Markdown."""
    names = list(measures(1))
    lines = [["setting", "steps", "positions", *names], ["---", *["--:"] * (len(names) + 2)]]
    for result in results:
        cells = []
        for name, (kind, count) in measures(block_size(result)).items():
            cells.append(format_value(name, value([count(item) for item in items_of(result, kind, domain)])))
        lines.append([result["name"], str(result["steps"]), f"{result['positions']:,}", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def steps_table(results: Sequence[dict[str, Any]], domain: str) -> str:
    """What each setting changed against the one it comes after, with intervals."""
    names = list(measures(1))[:NUM_SCORED_MEASURES]
    lines = [["step", *names], ["---", *["--:"] * len(names)]]
    for result, before in pairs_of(results):
        found = compare(result, before, domain)
        cells = [format_change(name, found.get(name)) for name in names]
        lines.append([f"{result['name']} over {before['name']}", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def format_change(name: str, found: tuple[float, float, float] | None) -> str:
    """A difference and its interval."""
    if found is None:
        return "-"
    scale, digits = (100, 1) if name.endswith(PER_CENT) else (1, 2)
    point, low, high = (scale * part for part in found)
    return f"{point:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def pairs_of(results: Sequence[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Each setting with the one that it comes after, where both are there."""
    by_name = {result["name"]: result for result in results}
    for result in results:
        if result["after"] in by_name:
            yield result, by_name[result["after"]]


def bars(results: Sequence[dict[str, Any]], domain: str) -> list[dict[str, Any]]:
    """One bar for each step and measure: it holds where the whole interval lies on the better side of 0."""
    found = []
    for result, before in pairs_of(results):
        for name, (point, low, high) in compare(result, before, domain).items():
            lower = name in LOWER_IS_BETTER
            found.append(
                {
                    "name": f"{name}, {result['name']} over {before['name']}",
                    "value": round(point, 4),
                    "interval": [round(low, 4), round(high, 4)],
                    "bar": 0.0,
                    "better": "lower" if lower else "higher",
                    "holds": bool(high < 0 if lower else low > 0),
                }
            )
    return found
