"""Part of A17: every figure of a report that follows from the answers, computed again from them alone.

Stated here once more, apart from the room that made the report: shares, Wilson intervals, speeds, differences.
"""

import math
from collections.abc import Iterator
from typing import Any

from ar2diff.audit.result import ClaimResult

REPORT_NAME, SAMPLES_NAME = "eval.json", "eval_samples.jsonl"
BASELINE, ALL = "ar", "all"
Z = 1.96
Sample = dict[str, Any]


def check_figures(samples: list[Sample], report: dict[str, Any], result: ClaimResult) -> None:
    """Intervals, equal answers, speeds and differences of every mode and domain; errors where a field is absent."""
    claimed = dict(_claimed(report))
    found = dict(_found(samples))
    here = {"claimed_in": REPORT_NAME, "found_in": SAMPLES_NAME}
    result.equal("figures that are in the report", sorted(claimed), sorted(found), **here)
    wrong = [name for name in sorted(claimed.keys() & found.keys()) if not _is_near(claimed[name], found[name])]
    shown = [f"{name}: {claimed[name]} instead of {found[name]}" for name in wrong[:5]]
    result.equal(f"figures of {len(found)} that do not follow from the answers", [], shown, **here)
    modes = {str(sample.get("mode")) for sample in samples}
    result.equal("bits of modes without answers", [], sorted(set(report.get("bits_per_token") or {}) - modes), **here)


def _claimed(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for score in report.get("scores", []):
        for name in ("interval", "equal_share", "tokens_per_s", "tokens_per_forward"):
            yield f"{name} of {score['mode']} in {score['domain']}", score.get(name)
    for entry in report.get("against_ar", []):
        place = f"{entry['mode']} in {entry['domain']} against {BASELINE}"
        for name in ("difference", "num_pairs", "num_left_out", "only_mode", "only_baseline"):
            yield f"{name} of {place}", entry.get(name)
        low, high = entry["interval"]
        yield f"order of the interval of {place}", -1 <= low <= entry["difference"] <= high <= 1
        # The paired bootstrap draws; that its interval is as wide as the pairs allow needs no draw.
        yield f"width of the interval of {place}", _is_wide_enough(entry)
    for mode, value in (report.get("speedup_over_ar") or {}).items():
        yield f"speed of {mode} over {BASELINE}", value


def _found(samples: list[Sample]) -> Iterator[tuple[str, Any]]:
    by_mode: dict[str, list[Sample]] = {}
    for sample in samples:
        by_mode.setdefault(str(sample.get("mode")), []).append(sample)
    base = {sample["problem_id"]: sample for sample in by_mode.get(BASELINE, [])}
    for mode, answers in by_mode.items():
        for domain in [*dict.fromkeys(str(sample.get("domain")) for sample in answers), ALL]:
            chosen = [sample for sample in answers if domain in (sample.get("domain"), ALL)]
            yield from _score(f"of {mode} in {domain}", chosen, base)
            if mode != BASELINE and any(map(_is_scored, chosen)):
                yield from _difference(f"{mode} in {domain} against {BASELINE}", chosen, base)
    speeds = {mode: _speed(answers) for mode, answers in by_mode.items()}
    if baseline := speeds.get(BASELINE):
        for mode, speed in speeds.items():
            yield f"speed of {mode} over {BASELINE}", round(speed / baseline, 4)


def _score(place: str, answers: list[Sample], base: dict[str, Sample]) -> Iterator[tuple[str, Any]]:
    scored = [sample for sample in answers if _is_scored(sample)]
    correct, complete = sum(bool(s["correct"]) for s in scored), sum(not _is_cut(s) for s in scored)
    pairs = [(sample, base[sample["problem_id"]]) for sample in answers if sample["problem_id"] in base]
    passes = sum(sample["num_forward_passes"] for sample in answers)
    yield f"interval {place}", _wilson(correct, complete) if scored else None
    same = sum(_ids(one) == _ids(other) for one, other in pairs)
    yield f"equal_share {place}", same / len(pairs) if pairs else None
    yield f"tokens_per_s {place}", _speed(answers)
    yield f"tokens_per_forward {place}", _tokens(answers) / passes if passes else 0.0


def _difference(place: str, answers: list[Sample], base: dict[str, Sample]) -> Iterator[tuple[str, Any]]:
    scored = filter(_is_scored, answers)
    shared = [(sample, base[sample["problem_id"]]) for sample in scored if sample["problem_id"] in base]
    pairs = [(bool(a["correct"]), bool(b["correct"])) for a, b in shared if not (_is_cut(a) or _is_cut(b))]
    yield f"difference of {place}", sum(a - b for a, b in pairs) / len(pairs) if pairs else 0.0
    yield f"num_pairs of {place}", len(pairs)
    yield f"num_left_out of {place}", len(shared) - len(pairs)
    yield f"only_mode of {place}", sum(a and not b for a, b in pairs)
    yield f"only_baseline of {place}", sum(b and not a for a, b in pairs)
    yield f"order of the interval of {place}", True
    yield f"width of the interval of {place}", True


def _is_wide_enough(entry: dict[str, Any]) -> bool:
    """Whether a bootstrap interval is near two standard errors to each side; the draws move it by a step or two."""
    pairs, mean = int(entry["num_pairs"]), float(entry["difference"])
    low, high = map(float, entry["interval"])
    if not pairs:
        return (low, high) == (-1.0, 1.0)
    spread = (entry["only_mode"] + entry["only_baseline"]) / pairs - mean * mean
    error = math.sqrt(max(spread, 0.0) / pairs)
    return abs((high - low) - 2 * Z * error) <= 2.0 / pairs + 0.2 * error


def _wilson(correct: int, complete: int) -> list[float]:
    """The Wilson score interval (Wilson, 1927) as the roots of its quadratic."""
    if not complete:
        return [0.0, 1.0]
    a, b, c = complete + Z * Z, -(2 * correct + Z * Z), correct * correct / complete
    root = math.sqrt(max(b * b - 4 * a * c, 0.0))
    return [max(0.0, (-b - root) / (2 * a)), min(1.0, (-b + root) / (2 * a))]


def _speed(answers: list[Sample]) -> float:
    seconds = sum(sample["seconds"] for sample in answers)
    return _tokens(answers) / seconds if seconds else 0.0


def _tokens(answers: list[Sample]) -> int:
    return sum(len(sample["token_ids"]) + sample["num_withheld"] for sample in answers)


def _ids(sample: Sample) -> tuple[list[int], str]:
    return sample["token_ids"], sample["ids_sha256"]


def _is_scored(sample: Sample) -> bool:
    return sample["correct"] is not None


def _is_cut(sample: Sample) -> bool:
    return bool(sample["finish_reason"] == "length")


def _is_near(claimed: object, found: object) -> bool:
    """Equal but for the order in which a sum was made."""
    if isinstance(claimed, list) and isinstance(found, list):
        return len(claimed) == len(found) and all(map(_is_near, claimed, found))
    if isinstance(claimed, int | float) and isinstance(found, int | float):
        return isinstance(claimed, bool) == isinstance(found, bool) and math.isclose(
            claimed, found, rel_tol=1e-4, abs_tol=1e-9
        )
    return claimed == found
