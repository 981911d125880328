"""A9, A10: each step consumed the declared rows and noise, and every resume began where a save ended."""

from collections.abc import Sequence
from typing import Any

from ar2diff.audit.claims.surroundings import find_other_code
from ar2diff.audit.claims.told import check_elapsed
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import DATA_DIR, RunFiles, line_of, read_object_lines
from ar2diff.data.stream import RowStream
from ar2diff.hashing import sha256_file
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent
from ar2diff.seeding import keyed_generator

METRICS_NAME = "metrics.jsonl"
NUM_SAMPLED = 24
# The code that a step's inputs follow from.
BATCH_CODE = ("data/", "diffusion/", "train/", "seeding.py")


def check_steps(run: RunFiles, result: ClaimResult, *, deep: bool) -> None:
    """A9: rows of every step from the seed; inputs and targets of all steps (deep) or a sample, by digest."""
    started = run.last("train_started")
    path = run.folder / METRICS_NAME
    if started is None or not path.is_file():
        where = LEDGER_NAME if started is None else METRICS_NAME
        result.missing("a training with its steps", found_in=where)
        return
    if not (run.folder / DATA_DIR).is_dir():
        result.missing("the data that was trained on", found_in=DATA_DIR)
        return
    lines, config = read_object_lines(path), started.data["config"]
    _check_log(run, lines, result)
    stream = RowStream(run.folder / DATA_DIR, row_len=config["row_len"], seed=config["seed"])
    per_step = config["micro"] * config["accum"]
    wrong = [idx + 1 for idx, line in enumerate(lines) if line.get("row_ids") != _rows_of(stream, idx, per_step)]
    result.equal("steps that took other rows", [], wrong[:8], claimed_in=METRICS_NAME, found_in="order from the seed")
    _check_digests(run, started, stream, lines, result, deep=deep)


def check_resumes(run: RunFiles, result: ClaimResult) -> None:
    """A10: weights and state taken over at a resume are those that the checkpoint before it was saved with."""
    starts = run.find("train_started")
    if not starts:
        result.missing("a start of training", found_in=LEDGER_NAME)
        return
    result.equal(
        "the first start is at step 0",
        0,
        starts[0].data.get("step"),
        claimed_in="first start",
        found_in=line_of(starts[0]),
    )
    for event in starts[1:]:
        _check_resume(run, event, result)


def _check_log(run: RunFiles, lines: list[dict[str, Any]], result: ClaimResult) -> None:
    steps = [line.get("step") for line in lines]
    result.equal(
        "steps follow each other",
        list(range(1, len(lines) + 1)),
        steps,
        claimed_in="1 to the last",
        found_in=METRICS_NAME,
    )
    ended = max([*run.find("train_finished"), *run.find("train_interrupted")], key=lambda e: e.seq, default=None)
    if ended is None:
        result.missing("an end of training", found_in=LEDGER_NAME)
        return
    here = {"claimed_in": line_of(ended), "found_in": METRICS_NAME}
    result.equal("number of steps", ended.data.get("step"), len(lines), **here)
    check_elapsed(ended, lines, METRICS_NAME, result)
    if ended.data.get("metrics_sha256") is None:
        result.missing("digest of the step log", found_in=line_of(ended))
    else:
        found = sha256_file(run.folder / METRICS_NAME)
        result.equal("sha256 of the step log", ended.data["metrics_sha256"], found, **here)


def _rows_of(stream: RowStream, step: int, per_step: int) -> list[int]:
    return [stream.row_id(step * per_step + idx) for idx in range(per_step)]


def _check_digests(
    run: RunFiles,
    started: LedgerEvent,
    stream: RowStream,
    lines: list[dict[str, Any]],
    result: ClaimResult,
    *,
    deep: bool,
) -> None:
    from ar2diff.audit.live.steps import StepDigests

    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        result.missing("the checkpoint's tokenizer, for the end token", found_in="checkpoints/")
        return
    digests = StepDigests(started.data["config"], stream, checkpoint, mask_token_id=started.data["mask_token_id"])
    chosen = list(range(len(lines))) if deep else choose_sample(started.digest, len(lines))
    wrong = [idx + 1 for idx in chosen if digests.differs(idx, lines[: idx + 1])]
    what = f"steps of {len(chosen)} checked (of {len(lines)}) with other inputs, targets or block size"
    others = find_other_code(run, *BATCH_CODE) if wrong else []
    if others:
        # What other code draws says nothing of the run; that the code is another one is A16's to judge.
        found = f"{others[0]} and {len(others) - 1} more" if len(others) > 1 else others[0]
        result.missing(
            "the code that drew the inputs: another one is installed here", found=found, found_in=METRICS_NAME
        )
    else:
        result.equal(what, [], wrong[:8], claimed_in=METRICS_NAME, found_in="order and noise key")
    result.level = (
        "all steps" if len(chosen) == len(lines) else f"{len(chosen)} of {len(lines)} steps; --deep takes all"
    )


def choose_sample(key: str, count: int) -> Sequence[int]:
    """The first and last step and others that the ledger's own digest draws: nobody can choose them beforehand."""
    if count <= NUM_SAMPLED:
        return range(count)
    drawn = keyed_generator("audit steps", key).bit_generator.random_raw(NUM_SAMPLED)
    return sorted({0, count - 1, *(int(word % count) for word in drawn)})


def _check_resume(run: RunFiles, event: LedgerEvent, result: ClaimResult) -> None:
    step = event.data.get("step")
    saved = [e for e in run.find("checkpoint_saved") if e.seq < event.seq and e.data.get("step") == step]
    if step == 0 and not any(e.seq < event.seq for e in run.find("checkpoint_saved")):
        return
    if not saved:
        result.fail(
            "a resume begins at a saved step",
            f"no checkpoint of step {step}",
            found_in=LEDGER_NAME,
            claimed=step,
            claimed_in=line_of(event),
        )
        return
    resumed = event.data.get("resumed")
    if not isinstance(resumed, dict):
        result.missing("the root of the weights taken over", found_in=line_of(event))
        return
    here = {"claimed_in": line_of(saved[-1]), "found_in": line_of(event)}
    for name, what in (
        ("tensor_root", "tensor root at the resume"),
        ("state_sha256", "digest of the state taken over"),
    ):
        result.equal(what, saved[-1].data.get(name), resumed.get(name), **here)
    # A damaged one may be passed over, where the ledger says so.
    skipped = {e.data.get("checkpoint") for e in run.find("checkpoint_skipped") if saved[-1].seq < e.seq < event.seq}
    later = [
        e
        for e in run.find("checkpoint_saved")
        if saved[-1].seq < e.seq < event.seq and f"step-{e.data.get('step'):06}" not in skipped
    ]
    result.equal("newer checkpoints that the resume left out", [], [e.data.get("step") for e in later], **here)
