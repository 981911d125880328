"""An adapter goes into the package: out of a finished run, with what proves where it came from, whole or not at all.

`receipt.json` beside the files says `{name, base, base_tensor_root, tensor_root, step, ledger, recipe, files}`: the
base as the recipe names it, the root of the model that the adapter makes of it, the ledger's size and head, and the
SHA-256 of every other file. `sources/shipped.py` reads it.
"""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ar2diff.errors import ConfigError, LedgerError, RunError
from ar2diff.export.export import ExportOptions, export_model
from ar2diff.files import PARTIAL_MARK, fsync_dir, read_json, write_bytes, write_json
from ar2diff.hashing import sha256_file
from ar2diff.models.adapter_file import EXPORTED_NAMES
from ar2diff.models.apply import apply_adapter
from ar2diff.models.loading import load_model
from ar2diff.pipelines.evaluation import EVALUATE_EVENT, REPORT_NAME
from ar2diff.pipelines.on_policy import ROUND_EVENT
from ar2diff.pipelines.run import FINISHED_EVENT, RECIPE_EVENT
from ar2diff.pipelines.stages import BASE_DIR, locate_base
from ar2diff.provenance.card import CARD_NAME
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent, verify_ledger
from ar2diff.provenance.signing import HEADS_NAME, SIGNER_EVENT, read_heads
from ar2diff.sources.shipped import RECEIPT_NAME, find_trained_root, verify_shipped
from ar2diff.train.checkpoint import list_checkpoints, step_of, verify_checkpoint

MAX_BYTES = 24_000_000
AUDIT_NAME = "audit.json"
KEPT_NAMES = (LEDGER_NAME, HEADS_NAME, CARD_NAME, REPORT_NAME)
_NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")
_FINISH = "Let the same command finish the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinishedRun:
    """What a finished run says of itself: its checkpoint, the root of that, its recipe, its ledger's events."""

    checkpoint: Path
    tensor_root: str
    recipe: dict[str, Any]
    events: list[LedgerEvent]


def ship_adapter(run_dir: Path, name: str, into: Path) -> Path:
    """Put the adapter of a run's newest checkpoint into `into`/`name`; returns that folder.

    The adapter is put on the run's base once, and what comes out must be what the ledger says.

    Raises:
        ConfigError: the name has odd characters or is taken, the checkpoint has no adapter, or all is too large.
        RunError: the run is not finished, a file of it is missing or not as logged, its audit is of another state or
            failed, or the checkpoint is not what its ledger says.
        LedgerError: the ledger or a signature does not hold, or the end of the ledger is not signed.
        CheckpointError, ModelError: the checkpoint or the base is damaged.
        SpaceError: not enough free space.
    """
    if not _NAME.fullmatch(name):
        fix = "Use a-z, 0-9, and single '.', '-' and '_' between them"
        raise ConfigError("an adapter's name has odd characters", given=name, fix=fix)
    if (into / name).exists():
        raise ConfigError("an adapter of that name is there already", given=str(into / name), fix="Remove it first")
    run = _open_finished(run_dir)
    verify_checkpoint(run.checkpoint)
    root = load_model(run.checkpoint).tensor_root
    if root != run.tensor_root:
        given = f"tensor root {root}, in the ledger {run.tensor_root}"
        raise RunError("the checkpoint is not the one that the ledger names", given=given, fix="Restore the run")
    kept = _list_kept(run_dir, run)
    with tempfile.TemporaryDirectory() as scratch:
        adapter = Path(scratch) / "adapter"
        export_model(run.checkpoint, "adapter", adapter, ExportOptions())
        applied = apply_adapter(
            locate_base(run_dir / BASE_DIR), adapter, Path(scratch) / "model", tensor_root=run.tensor_root
        )
        about = {"name": name, **_describe(run, applied.base_tensor_root)}
        return _place([*(adapter / exported for exported in EXPORTED_NAMES), *kept], about, into / name)


def _open_finished(run_dir: Path) -> _FinishedRun:
    if not (run_dir / LEDGER_NAME).is_file():
        raise RunError("not the folder of a run", given=str(run_dir), fix="Name one that `ar2diff run` made")
    events = _verify_signed(run_dir)
    last = {event.type: event.data for event in events}
    checkpoints, root = list_checkpoints(run_dir), find_trained_root(events)
    ended = FINISHED_EVENT in last and RECIPE_EVENT in last and root is not None and checkpoints
    if not ended or checkpoints[-1].name != last[FINISHED_EVENT]["checkpoint"]:
        raise RunError("the run is not finished", given=str(run_dir), fix=_FINISH)
    if ROUND_EVENT in last:
        raise RunError("on-policy rounds went on from the checkpoint", given=str(run_dir), fix="Ship a run without")
    return _FinishedRun(
        checkpoint=checkpoints[-1], tensor_root=str(root), recipe=last[RECIPE_EVENT]["recipe"], events=events
    )


def _verify_signed(run_dir: Path) -> list[LedgerEvent]:
    """The ledger's events: the chain holds, so does every signature, and the last one is over all of it."""
    events = verify_ledger(run_dir / LEDGER_NAME)
    heads = read_heads(run_dir / HEADS_NAME, [event.data for event in events if event.type == SIGNER_EVENT])
    for number, head in enumerate(heads, start=1):
        if head.fault is not None:
            raise LedgerError(f"line {number} of {HEADS_NAME}: {head.fault}", given=str(run_dir))
        verify_ledger(run_dir / LEDGER_NAME, size=head.size, head=head.head)
    if not heads or heads[-1].size != len(events):
        raise LedgerError("the end of the ledger is not signed", given=str(run_dir), fix=_FINISH)
    return events


def _list_kept(run_dir: Path, run: _FinishedRun) -> list[Path]:
    """The run's own files that go along, after those that the ledger or the audit speaks of were compared."""
    lost = [name for name in KEPT_NAMES if not (run_dir / name).is_file()]
    if lost:
        raise RunError(f"{lost[0]} of the run is missing", given=str(run_dir), fix=_FINISH)
    measured = [event.data for event in run.events if event.type == EVALUATE_EVENT]
    logged = [measured[-1]["roots"]["converted"], measured[-1]["report"]["sha256"]] if measured else []
    if logged != [run.tensor_root, sha256_file(run_dir / REPORT_NAME)]:
        raise RunError(f"{REPORT_NAME} is not the one of this checkpoint", given=str(run_dir), fix=_FINISH)
    audit = run_dir / AUDIT_NAME
    if audit.is_file():
        _check_audit(audit, run)
    return [run_dir / name for name in KEPT_NAMES] + [audit] * audit.is_file()


def _check_audit(audit: Path, run: _FinishedRun) -> None:
    report = read_json(audit, error=RunError)
    state = {"size": len(run.events), "head": run.events[-1].digest}
    if not isinstance(report, dict) or report.get("ledger") != state:
        raise RunError("the audit is of another state of the run", given=str(audit), fix="Audit the run again")
    if report.get("verdict") == "fail":
        raise RunError("the run failed its audit", given=str(audit), fix="Ship a run that passes")


def _describe(run: _FinishedRun, base_tensor_root: str) -> dict[str, Any]:
    return {
        "base": run.recipe["base"]["source"],
        "base_tensor_root": base_tensor_root,
        "tensor_root": run.tensor_root,
        "step": step_of(run.checkpoint),
        "ledger": {"size": len(run.events), "head": run.events[-1].digest},
        "recipe": run.recipe,
    }


def _place(files: list[Path], about: dict[str, Any], folder: Path) -> Path:
    """Copy the files into the new `folder` and write their receipt; read as it will be read, then renamed."""
    partial = folder.with_name(f"{folder.name}{PARTIAL_MARK}{os.getpid()}")
    folder.parent.mkdir(exist_ok=True)
    try:
        for left in folder.parent.glob(f"{folder.name}{PARTIAL_MARK}*"):
            shutil.rmtree(left)
        partial.mkdir()
        for path in files:
            write_bytes(partial / path.name, path.read_bytes())
        digests = {path.name: sha256_file(partial / path.name) for path in files}
        write_json(partial / RECEIPT_NAME, {**about, "files": digests})
        _check_size(partial)
        verify_shipped(partial)
        partial.rename(folder)
        fsync_dir(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _check_size(folder: Path) -> None:
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    if num_bytes > MAX_BYTES:
        given = f"{num_bytes / 1e6:.1f} MB, {MAX_BYTES / 1e6:.0f} MB at most"
        raise ConfigError("the adapter is too large for the package", given=given, fix="Train one of a lower rank")
