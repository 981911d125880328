"""The outer form of what a run proves: in-toto statements, with a SLSA provenance for each stage and a verification
summary for the audit.

Formats: in-toto Statement v1; SLSA provenance v1; SLSA verification summary v1. Statements are plain values; they are
signed, where they are, as DSSE envelopes.
"""

from collections.abc import Iterable
from typing import Any

from ar2diff.provenance.environment import APPLIED_EVENT
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PROVENANCE_TYPE = "https://slsa.dev/provenance/v1"
SUMMARY_TYPE = "https://slsa.dev/verification_summary/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
BUILD_TYPE = "ar2diff:stage/v1"

Subject = dict[str, Any]


def build_statement(subjects: list[Subject], predicate_type: str, predicate: dict[str, Any]) -> dict[str, Any]:
    """A statement about files that are known by their digests."""
    return {"_type": STATEMENT_TYPE, "subject": subjects, "predicateType": predicate_type, "predicate": predicate}


def list_stage_statements(events: Iterable[LedgerEvent]) -> list[dict[str, Any]]:
    """A provenance statement for each stage of a ledger: what it made, from what, under which settings."""
    made: list[dict[str, Any]] = []
    materials: list[Subject] = []
    started: LedgerEvent | None = None
    for event in events:
        if event.type == "train_started":
            started = event
        subjects = _subjects(event)
        if not subjects:
            continue
        settings = started if event.type in ("train_finished", "train_interrupted") else event
        config = (settings or event).data.get("config") or {"source": event.data.get("source")}
        made.append(build_statement(subjects, PROVENANCE_TYPE, _provenance(event, config, list(materials))))
        materials += subjects
    return made


def summarise_verification(
    *, run_id: str, ledger_head: str, ledger_size: int, passed: bool, verifier: str, claims: dict[str, str]
) -> dict[str, Any]:
    """The audit's result as a verification summary of the ledger; `claims` are verdicts by claim id."""
    predicate = {
        "verifier": {"id": "ar2diff:audit", "version": {"ar2diff": verifier}},
        "resourceUri": f"ar2diff:{run_id}",
        "policy": {"uri": "ar2diff:audit/v1"},
        "verificationResult": "PASSED" if passed else "FAILED",
        "verifiedLevels": [],
        "ar2diff": {"claims": claims, "ledger_size": ledger_size},
    }
    return build_statement([_subject(LEDGER_NAME, ledger_head)], SUMMARY_TYPE, predicate)


def _subjects(event: LedgerEvent) -> list[Subject]:
    data = event.data
    if event.type == "fetch":
        return [_subject(f"{data.get('folder')}/{file['path']}", file["sha256"]) for file in data.get("files", [])]
    if event.type == APPLIED_EVENT:
        files = [_subject(f"{data.get('folder')}/{name}", digest) for name, digest in data.get("files", {}).items()]
        return [*files, _subject(f"{data.get('folder')} (tensor root)", str(data.get("tensor_root")))]
    if event.type == "prepare":
        return [_subject(f"data/{name}", digest) for name, digest in data.get("files", {}).items()]
    if event.type in ("train_finished", "train_interrupted"):
        return [_subject(f"checkpoints/{data.get('checkpoint')} (tensor root)", str(data.get("tensor_root")))]
    if event.type in ("evaluate", "harness", "bench"):
        return [_subject(part["path"], part["sha256"]) for part in (data.get("report"), data.get("samples")) if part]
    return []


def _provenance(event: LedgerEvent, config: dict[str, Any], materials: list[Subject]) -> dict[str, Any]:
    return {
        "buildDefinition": {
            "buildType": f"{BUILD_TYPE}/{event.type}",
            "externalParameters": config,
            "resolvedDependencies": materials,
        },
        "runDetails": {
            "builder": {"id": "ar2diff:run"},
            "metadata": {"invocationId": f"{LEDGER_NAME}#{event.seq + 1}", "finishedOn": event.time},
        },
    }


def _subject(name: str, sha256: str) -> Subject:
    return {"name": name, "digest": {"sha256": sha256}}
