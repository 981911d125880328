"""A17: the numbers of the report follow from the kept answers, and each answer is graded again from its text."""

from collections import Counter
from typing import Any

from ar2diff.audit.claims.figures import check_figures
from ar2diff.audit.claims.harness import check_files, check_harness
from ar2diff.audit.claims.requests import check_requests
from ar2diff.audit.claims.speed import check_speed
from ar2diff.audit.data_rerun import find_tokenizer, read_config
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of, read_object, read_object_lines
from ar2diff.data.config import EvaluationShare
from ar2diff.data.evaluation_items import load_problems
from ar2diff.provenance.ledger import LedgerEvent
from ar2diff.tasks.problem import Problem
from ar2diff.tasks.table import find_task

REPORT_NAME, SAMPLES_NAME = "eval.json", "eval_samples.jsonl"
COUNTED = ("num_problems", "num_correct", "num_truncated", "num_tokens", "num_forward_passes")
# Absent from reports made before some problems had no right answer.
COUNTED_LATER = ("num_scored", "num_graded", "num_drafts", "num_accepted")


def check_evaluation(run: RunFiles, result: ClaimResult) -> None:
    """Digests, grades, counts and figures of the newest evaluation, of lm-eval's tasks and of the speed."""
    _check_answers(run, result)
    check_harness(run, result)
    check_speed(run, result)


def _check_answers(run: RunFiles, result: ClaimResult) -> None:
    event = run.last("evaluate")
    if event is None:
        left = [name for name in (REPORT_NAME, SAMPLES_NAME) if (run.folder / name).exists()]
        if left:
            result.fail(
                "every report was logged",
                "no evaluation event",
                found_in="ledger.jsonl",
                claimed=left,
                claimed_in="run",
            )
        else:
            result.not_claimed("nothing was evaluated", found_in="ledger.jsonl")
        return
    if not check_files(run, event, {"report": REPORT_NAME, "samples": SAMPLES_NAME}, result):
        return
    samples, report = read_object_lines(run.folder / SAMPLES_NAME), read_object(run.folder / REPORT_NAME)
    _regrade(run, samples, report, result)
    _recount(samples, report, result)
    check_figures(samples, report, result)
    _check_asked(samples, report, result)
    _check_texts(run, samples, result)
    _check_roots(event, report, result)
    check_requests(run, event, samples, _build_problems(run, report), result)


def _regrade(run: RunFiles, samples: list[dict[str, Any]], report: dict[str, Any], result: ClaimResult) -> None:
    problems = _build_problems(run, report)
    unknown = sorted({str(s.get("problem_id")) for s in samples} - set(problems))
    result.equal("answers to problems that do not exist", [], unknown[:5], claimed_in="tasks", found_in=SAMPLES_NAME)
    known = [sample for sample in samples if sample.get("problem_id") in problems]
    wrong = [
        f"{s['mode']}: {s['problem_id']}" for s in known if _grade(problems[s["problem_id"]], s) != s.get("correct")
    ]
    here = {"claimed_in": SAMPLES_NAME, "found_in": "graded again from the text"}
    result.equal(f"answers of {len(known)} with another grade", [], wrong[:5], **here)
    domains = [s["problem_id"] for s in known if s.get("domain") != problems[s["problem_id"]].domain]
    result.equal("answers under another domain", [], domains[:5], claimed_in="tasks", found_in=SAMPLES_NAME)


def _build_problems(run: RunFiles, report: dict[str, Any]) -> dict[str, Problem]:
    """Every problem that the report's settings or the data config name, by id."""
    asked = report["about"]["settings"]["problems"]
    kept_out = [] if (prepared := run.last("prepare")) is None else read_config(prepared.data).evaluation
    shares = dict.fromkeys([*kept_out, *(EvaluationShare(**share) for share in asked)])
    fetched = run.fetched_folders()
    return {problem.id: problem for share in shares for problem in load_problems(share, fetched)}


def _grade(problem: Problem, sample: dict[str, Any]) -> bool | None:
    score = find_task(problem.task).score
    if score is None:
        return None
    return sample.get("finish_reason") != "length" and score(problem, str(sample.get("text")))


def _recount(samples: list[dict[str, Any]], report: dict[str, Any], result: ClaimResult) -> None:
    counts: dict[tuple[str, str], Counter[str]] = {}
    for sample in samples:
        for domain in (str(sample.get("domain")), "all"):
            count = counts.setdefault((str(sample.get("mode")), domain), Counter())
            count["num_problems"] += 1
            count["num_correct"] += bool(sample.get("correct"))
            is_scored, is_cut = sample.get("correct") is not None, sample.get("finish_reason") == "length"
            count["num_scored"] += is_scored
            count["num_graded"] += is_scored and not is_cut
            count["num_truncated"] += is_cut
            count["num_tokens"] += len(sample.get("token_ids", [])) + int(sample.get("num_withheld", 0))
            count["num_forward_passes"] += int(sample.get("num_forward_passes", 0))
            count["num_drafts"] += sum(sample.get("drafted_by_offset", [])[:1])
            count["num_accepted"] += sum(sample.get("accepted_by_offset", []))
    scores = {(str(score.get("mode")), str(score.get("domain"))): score for score in report.get("scores", [])}
    here = {"claimed_in": REPORT_NAME, "found_in": SAMPLES_NAME}
    named = sorted([str(score.get("mode")), str(score.get("domain"))] for score in report.get("scores", []))
    result.equal("modes and domains", named, sorted(map(list, counts)), **here)
    for key in scores.keys() & counts.keys():
        names = [*COUNTED, *(name for name in COUNTED_LATER if name in scores[key])]
        claimed, found = [scores[key].get(name) for name in names], [counts[key][name] for name in names]
        result.equal(f"{', '.join(names)} of {key[0]} in {key[1]}", claimed, found, **here)
        share = counts[key]["num_correct"] / max(1, counts[key]["num_graded"])
        accuracy = share if counts[key]["num_scored"] else None
        result.equal(f"accuracy of {key[0]} in {key[1]}", scores[key].get("accuracy"), accuracy, **here)


def _check_asked(samples: list[dict[str, Any]], report: dict[str, Any], result: ClaimResult) -> None:
    """Every mode answers the same problems, each once; all that were asked for, unless a time budget ended it."""
    asked = Counter((str(sample.get("mode")), str(sample.get("problem_id"))) for sample in samples)
    here = {"claimed_in": REPORT_NAME, "found_in": SAMPLES_NAME}
    twice = [f"{mode}: {problem}" for (mode, problem), count in asked.items() if count > 1]
    result.equal("problems answered more than once", [], twice[:5], **here)
    modes, problems = {mode for mode, _ in asked}, {problem for _, problem in asked}
    left_out = sorted(f"{mode}: {problem}" for mode in modes for problem in problems if (mode, problem) not in asked)
    result.equal("problems that some modes did not answer", [], left_out[:5], **here)
    settings = report["about"]["settings"]
    # A stored benchmark may have fewer rows than were asked for.
    if settings.get("minutes") is None and not any(share.get("source") for share in settings["problems"]):
        count = sum(int(share["count"]) for share in settings["problems"])
        result.equal("problems asked", count, len(problems), **here)


def _check_texts(run: RunFiles, samples: list[dict[str, Any]], result: ClaimResult) -> None:
    """An answer's text is that of its tokens."""
    tokenizer = find_tokenizer(run)
    if tokenizer is None:
        result.missing("a tokenizer to read the answers with", found_in="base/, checkpoints/")
        return
    wrong = [
        f"{sample.get('mode')}: {sample.get('problem_id')}"
        for sample in samples
        # Where a task's owner asks that its text stay unpublished, the answer's tokens are not kept.
        if not sample.get("num_withheld")
        if tokenizer.decode(list(sample.get("token_ids", []))) != sample.get("text")
    ]
    here = {"claimed_in": SAMPLES_NAME, "found_in": "token_ids, decoded"}
    result.equal("answers whose tokens have another text", [], wrong[:5], **here)


def _check_roots(event: LedgerEvent, report: dict[str, Any], result: ClaimResult) -> None:
    here = {"claimed_in": line_of(event), "found_in": REPORT_NAME}
    for name in ("roots", "engine", "settings"):
        result.equal(f"{name} of the evaluation", event.data.get(name), report["about"].get(name), **here)
