"""Part of A11: on-policy rounds follow one another from the converted checkpoint; their files are as logged."""

from itertools import pairwise

from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of
from ar2diff.audit.tensor_files import list_model_tensors, stored_root
from ar2diff.hashing import sha256_file
from ar2diff.provenance.ledger import LedgerEvent
from ar2diff.sources.spec import is_inside

ROUND_EVENT = "on_policy_round"
# Beside a round's training, whose checkpoint the event names.
STATES_DIR, REVEALS_NAME, METRICS_NAME = "states", "reveals.npy", "metrics.jsonl"


def check_rounds(run: RunFiles, result: ClaimResult) -> None:
    """Each round's student is the model that was there before it; its states, steps and checkpoint are as logged."""
    ended = [*run.find("conversion_finished"), *run.find(ROUND_EVENT)]
    for before, event in pairwise(ended):
        if event.type != ROUND_EVENT:
            continue
        here = {"claimed_in": line_of(before), "found_in": line_of(event)}
        result.equal(
            "the model that a round began with",
            before.data.get("tensor_root"),
            event.data.get("student_tensor_root"),
            **here,
        )
        _check_files(run, event, result)


def _check_files(run: RunFiles, event: LedgerEvent, result: ClaimResult) -> None:
    name = str(event.data.get("checkpoint"))
    checkpoint = run.folder / name
    if not is_inside(name) or not checkpoint.is_dir():
        result.missing("the checkpoint of a round", found=name, found_in=line_of(event))
        return
    where = line_of(event)
    found = stored_root(list_model_tensors(checkpoint))
    result.equal("tensor root of a round", event.data.get("tensor_root"), found, claimed_in=where, found_in=name)
    training = checkpoint.parents[1]
    files = {training.parent / REVEALS_NAME: event.data.get("reveals_sha256")}
    files[training / METRICS_NAME] = event.data.get("metrics_sha256")
    shard = event.data.get("files")
    for file, digest in (shard if isinstance(shard, dict) else {}).items():
        files[training.parent / STATES_DIR / str(file)] = digest
    for path, digest in files.items():
        if not path.is_file():
            result.missing("a file of a round", found_in=run.name(path))
        else:
            result.equal("sha256", digest, sha256_file(path), claimed_in=where, found_in=run.name(path))
