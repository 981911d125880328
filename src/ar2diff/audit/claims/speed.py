"""The part of A17 about `ar2diff bench`: the table's figures follow from the turns that were timed."""

from statistics import median
from typing import Any

from ar2diff.audit.claims.harness import check_files
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of, read_object

SPEED_NAME = "speed.json"


def check_speed(run: RunFiles, result: ClaimResult) -> None:
    """Digest and figures of the newest measurement of speed, where there is one."""
    event = run.last("bench")
    if event is None:
        if (run.folder / SPEED_NAME).exists():
            result.fail("every measurement was logged", "no bench event", found_in="ledger.jsonl", claimed=SPEED_NAME)
        return
    if not check_files(run, event, {"report": SPEED_NAME}, result):
        return
    report = read_object(run.folder / SPEED_NAME)
    here = {"claimed_in": line_of(event), "found_in": SPEED_NAME}
    result.equal("tensor roots of the contestants", event.data.get("roots"), report["about"].get("roots"), **here)
    wrong = [
        f"{row['name']}, batch {row['batch_size']}"
        for row in report["rows"]
        if _tokens_per_s(report["turns"], row["name"], row["batch_size"]) != row["tokens_per_s"]
    ]
    result.equal("rows that the timed turns do not give", [], wrong[:5], claimed_in=SPEED_NAME, found_in="its turns")


def _tokens_per_s(turns: list[dict[str, Any]], name: str, batch_size: int) -> float | None:
    """Tokens of all requests over the seconds of a turn, the median of its repeats."""
    rates = [
        turn["num_tokens"] / turn["seconds"]
        for turn in turns
        if (turn["name"], turn["batch_size"]) == (name, batch_size) and turn["seconds"] > 0
    ]
    return round(median(rates), 3) if rates else None
