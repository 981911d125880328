"""The part of A17 about lm-evaluation-harness: its samples graded again, its figures averaged again.

Nothing of the run is executed: task files may hold code, so grades are made again here, by what lm-eval documents of
its own metrics. A metric that is not known here is evidence missing, never a pass.
"""

import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of, read_object, read_object_lines
from ar2diff.hashing import sha256_file
from ar2diff.provenance.ledger import LedgerEvent

HARNESS_REPORT, HARNESS_SAMPLES = "harness.json", "harness_samples.jsonl"
Sample = dict[str, Any]
# A number, or a sum with its weight.
Value = float | list[float]


def check_harness(run: RunFiles, result: ClaimResult) -> None:
    """Digests, grades and figures of the newest evaluation by lm-eval, where there is one."""
    event = run.last("harness")
    left = [name for name in (HARNESS_REPORT, HARNESS_SAMPLES) if (run.folder / name).exists()]
    if event is None:
        if left:
            result.fail("every report was logged", "no harness event", found_in="ledger.jsonl", claimed=left)
        return
    if not check_files(run, event, {"report": HARNESS_REPORT, "samples": HARNESS_SAMPLES}, result):
        return
    report, samples = read_object(run.folder / HARNESS_REPORT), read_object_lines(run.folder / HARNESS_SAMPLES)
    here = {"claimed_in": line_of(event), "found_in": HARNESS_REPORT}
    result.equal(
        "tensor root of the model that lm-eval asked", event.data.get("root"), report["about"]["root"], **here
    )
    named = {str(sample.get("task")) for sample in samples}
    result.equal("tasks", sorted(report["tasks"]), sorted(named), claimed_in=HARNESS_REPORT, found_in=HARNESS_SAMPLES)
    for name, task in sorted(report["tasks"].items()):
        _check_task(name, task, [sample for sample in samples if sample.get("task") == name], result)


def check_files(run: RunFiles, event: LedgerEvent, files: dict[str, str], result: ClaimResult) -> bool:
    """Whether the files are there; their digests are compared with those of the event."""
    absent = [name for name in files.values() if not (run.folder / name).is_file()]
    for name in absent:
        result.missing("a file of the evaluation", found_in=name)
    for kind, name in files.items():
        if name not in absent:
            claimed = (event.data.get(kind) or {}).get("sha256")
            found = sha256_file(run.folder / name)
            result.equal(f"sha256 of {name}", claimed, found, claimed_in=line_of(event), found_in=name)
    return not absent


def _check_task(name: str, task: dict[str, Any], samples: Sequence[Sample], result: ClaimResult) -> None:
    count = len({sample.get("doc_id") for sample in samples})
    here = {"claimed_in": HARNESS_REPORT, "found_in": HARNESS_SAMPLES}
    result.equal(f"samples of {name}", task.get("num_samples"), count, **here)
    settings = task.get("settings") or {}
    metrics = {str(entry.get("metric")): entry for entry in settings.get("metric_list") or []}
    for key, claimed in sorted((task.get("results") or {}).items()):
        metric, _, filter_name = key.partition(",")
        chosen = [sample for sample in samples if sample.get("filter") == filter_name]
        _check_grades(f"{name}, {metric}", metric, settings, metrics.get(metric, {}), chosen, result)
        found = average(metric, [sample.get(metric) for sample in chosen])
        if found is None:
            result.missing(f"how {metric} of {name} is averaged", found_in=HARNESS_REPORT, found=key)
            continue
        same = isinstance(claimed, int | float) and math.isclose(claimed, found, rel_tol=1e-9, abs_tol=1e-12)
        same = same or (claimed is None and not math.isfinite(found))
        result.holds(f"{metric} of {name}", same, claimed=claimed, found=found, **here)


def _check_grades(
    what: str,
    metric: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    samples: Sequence[Sample],
    result: ClaimResult,
) -> None:
    grade = GRADES.get((str(settings.get("output_type")), metric))
    known = grade is not None and not options.keys() - KNOWN_OPTIONS
    asked = {**options, DELIMITER: settings.get(DELIMITER, " ")}
    grades = [_is_graded(grade, sample, metric, asked) if grade and known else None for sample in samples]
    ungraded = sum(found is None for found in grades)
    if ungraded:
        result.missing(f"a second grader for {what}", found_in=HARNESS_SAMPLES, found=f"{ungraded} samples")
    wrong = [sample.get("doc_id") for sample, found in zip(samples, grades, strict=True) if found is False]
    here = {"claimed_in": HARNESS_SAMPLES, "found_in": "graded again from the answers"}
    result.equal(f"samples of {len(samples)} with another grade in {what}", [], wrong[:5], **here)


def _is_graded(grade: "Grade", sample: Sample, metric: str, options: dict[str, Any]) -> bool | None:
    """Whether a sample has its own grade; None where its form is not known here, or its text was not kept."""
    try:
        found, claimed = _as_list(grade(sample, options)), _as_list(sample[metric])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError):
        return None
    return len(found) == len(claimed) and all(map(math.isclose, found, claimed))


def _as_list(value: Any) -> list[float]:
    return [float(item) for item in (value if isinstance(value, list) else [value])]


# Between a question and its answer; what a choice's text follows.
DELIMITER = "target_delimiter"
Grade = Callable[[Sample, dict[str, Any]], Value]
KNOWN_OPTIONS = {
    "metric", "aggregation", "higher_is_better", "ignore_case", "ignore_punctuation", "ignore_numbers"
}  # fmt: skip


def _is_same_text(sample: Sample, options: dict[str, Any]) -> float:
    left, right = (_strip(str(text), options) for text in (sample["filtered_resps"][0], sample["target"]))
    return float(left == right)


def _strip(text: str, options: dict[str, Any]) -> str:
    dropped = (string.punctuation if options.get("ignore_punctuation") else "") + (
        string.digits if options.get("ignore_numbers") else ""
    )
    text = text.lower() if options.get("ignore_case") else text
    return text.translate(str.maketrans("", "", dropped))


def _choice_by(length: Callable[[str], float]) -> Grade:
    """Whether the likeliest choice, its log p over `length` of its text, is the right one."""

    def grade(sample: Sample, options: dict[str, Any]) -> float:
        pairs = zip(sample["filtered_resps"], sample["arguments"], strict=True)
        texts = [(float(response[0]), asked[1].removeprefix(options[DELIMITER])) for response, asked in pairs]
        scores = [logprob / length(text) for logprob, text in texts]
        return float(scores.index(max(scores)) == int(sample["target"]))

    return grade


def _is_likeliest(sample: Sample, options: dict[str, Any]) -> float:  # noqa: ARG001
    return float(bool(sample["filtered_resps"][0][1]))


def _log_p(sample: Sample, options: dict[str, Any]) -> float:  # noqa: ARG001
    return float(sample["filtered_resps"][0][0])


def _log_p_by(count: Callable[[str], int]) -> Grade:
    def grade(sample: Sample, options: dict[str, Any]) -> list[float]:  # noqa: ARG001
        return [float(sample["filtered_resps"][0]), float(count(sample["target"]))]

    return grade


def _count_bytes(text: str) -> int:
    return len(text.encode())


def _count_words(text: str) -> int:
    # As lm-eval counts: empty pieces at the ends are words too.
    return len(re.split(r"\s+", text))


GRADES: dict[tuple[str, str], Grade] = {
    ("generate_until", "exact_match"): _is_same_text,
    ("multiple_choice", "acc"): _choice_by(lambda _: 1.0),
    ("multiple_choice", "acc_norm"): _choice_by(len),
    ("multiple_choice", "acc_bytes"): _choice_by(_count_bytes),
    ("loglikelihood", "acc"): _is_likeliest,
    ("loglikelihood", "perplexity"): _log_p,
    ("loglikelihood_rolling", "word_perplexity"): _log_p_by(_count_words),
    ("loglikelihood_rolling", "byte_perplexity"): _log_p_by(_count_bytes),
    ("loglikelihood_rolling", "bits_per_byte"): _log_p_by(_count_bytes),
}


def average(metric: str, values: Sequence[Any]) -> float | None:
    """The figure of a task from its samples' values, as lm-eval's own metrics are averaged; None for what is not."""
    try:
        if not values:
            return None
        if all(isinstance(value, list) for value in values):
            share = sum(float(value[0]) for value in values) / sum(float(value[1]) for value in values)
            return -share / math.log(2) if metric.startswith("bits") else math.exp(-share)
        mean = sum(float(value) for value in values) / len(values)
        return math.exp(-mean) if metric == "perplexity" else mean
    except (TypeError, ValueError, ZeroDivisionError):
        return None
    except OverflowError:
        return math.inf
