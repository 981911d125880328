"""Checkpoints: a loadable model folder plus what resuming needs, written whole or not at all.

`step-000100/` holds the model's files, `optimizer.safetensors`, `training.json` with the SHA-256 of every file, and
`COMPLETE`, written last, with the SHA-256 of `training.json`. No pickle anywhere.
"""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from ar2diff.errors import CheckpointError
from ar2diff.files import (
    PARTIAL_MARK,
    check_free_space,
    fsync_dir,
    read_json,
    space_error,
    write_json,
    write_text,
)
from ar2diff.hashing import sha256_file
from ar2diff.models.safetensors_file import write_file
from ar2diff.provenance.ledger import Ledger

CHECKPOINTS_DIR = "checkpoints"
STATE_NAME = "training.json"
OPTIMIZER_NAME = "optimizer.safetensors"
COMPLETE_NAME = "COMPLETE"
OLDER_MARK = ".older"
_STEP_NAME = re.compile(r"step-[0-9]{6,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What a resumed run has to know besides tensors.

    Attributes:
        step: optimizer steps done.
        elapsed_s: time the training loop took so far.
        base_tensor_root: the model the run started from.
        config_sha256: the run's config.
        block_sizes_done: block sizes that were trained so far.
    """

    step: int
    elapsed_s: float
    base_tensor_root: str
    config_sha256: str
    block_sizes_done: tuple[int, ...]


def checkpoint_dir(out_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return out_dir / CHECKPOINTS_DIR / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(out_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first; a user's copy under another name is none."""
    marks = (out_dir / CHECKPOINTS_DIR).glob(f"step-*/{COMPLETE_NAME}")
    return sorted((mark.parent for mark in marks if _STEP_NAME.fullmatch(mark.parent.name)), key=step_of)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is, or was, a training checkpoint, whose digests have to hold; a plain model has none."""
    return any((folder / name).exists() for name in (STATE_NAME, COMPLETE_NAME, OPTIMIZER_NAME))


def write_checkpoint(
    folder: Path, *, write_model: Callable[[Path], str], optimizer: Mapping[str, Tensor] | Path, state: TrainingState
) -> str:
    """Write a checkpoint; it appears, complete and durable, only at the end. Returns the model's tensor root.

    Args:
        write_model: writes the model's files into a folder and returns the tensor root.
        optimizer: its tensors, or a file of them on the same disk, which is moved.

    Raises:
        SpaceError: not enough free space; nothing is left behind, and what was there before stays.
        CheckpointError: the folder cannot be written for another reason; the same holds.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(optimizer, Path):
        check_free_space(folder.parent, sum(t.numel() * t.element_size() for t in optimizer.values()))
    fsync_dir(folder.parent.parent)
    partial = folder.with_name(f"{folder.name}{PARTIAL_MARK}{os.getpid()}")
    older = folder.with_name(f"{partial.name}{OLDER_MARK}")
    try:
        # In a container every process may have the same number: a killed one may have left these.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        root = write_model(partial)
        if isinstance(optimizer, Path):
            optimizer.rename(partial / OPTIMIZER_NAME)
        else:
            write_file(partial / OPTIMIZER_NAME, optimizer)
        digests = {path.name: sha256_file(path) for path in sorted(partial.iterdir())}
        write_json(partial / STATE_NAME, {**asdict(state), "tensor_root": root, "files": digests})
        write_text(partial / COMPLETE_NAME, sha256_file(partial / STATE_NAME) + "\n")
        # An older checkpoint of the same step stays whole until the new one is in its place.
        if folder.exists():
            shutil.rmtree(older, ignore_errors=True)
            folder.rename(older)
        partial.rename(folder)
        fsync_dir(folder.parent)
        shutil.rmtree(older, ignore_errors=True)
    except (OSError, safetensors.SafetensorError) as error:
        failed = CheckpointError(
            f"a checkpoint could not be written: {error}",
            given=str(folder),
            fix="Make the folder writable, then go on with --init and the last checkpoint",
        )
        raise space_error(error, folder) or failed from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return root


def find_newest_good_checkpoint(out_dir: Path, *, ledger: Ledger | None = None) -> Path | None:
    """The newest complete checkpoint whose every file is as it was written; None where there is no checkpoint.

    Damaged ones are passed over, each with a warning and a `checkpoint_skipped` event in the ledger.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    restore_set_aside(out_dir)
    found = list_checkpoints(out_dir)
    if good := _newest_good(found, 1, ledger):
        return good[0]
    if found:
        raise CheckpointError(
            "every checkpoint is damaged", given=str(out_dir), fix="Restore one of them, or start anew elsewhere"
        )
    return None


def list_good_checkpoints(out_dir: Path, count: int, *, up_to: int, ledger: Ledger | None = None) -> list[Path]:
    """The newest `count` complete and undamaged checkpoints of steps up to `up_to`, oldest first.

    Damaged ones are passed over, each with a warning and a `checkpoint_skipped` event in the ledger.
    """
    found = [path for path in list_checkpoints(out_dir) if step_of(path) <= up_to]
    return _newest_good(found, count, ledger)[::-1]


def _newest_good(found: Sequence[Path], count: int, ledger: Ledger | None) -> list[Path]:
    good: list[Path] = []
    for folder in reversed(found):
        if len(good) == count:
            break
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            warnings.warn(f"passed over a damaged checkpoint: {error}", RuntimeWarning, stacklevel=3)
            if ledger is not None:
                ledger.append("checkpoint_skipped", {"checkpoint": folder.name, "reason": error.problem})
            continue
        good.append(folder)
    return good


def read_checkpoint(folder: Path) -> tuple[TrainingState, dict[str, Tensor]]:
    """The training state and the optimizer's tensors, after every file's digest was checked.

    Raises:
        CheckpointError: the folder is no complete checkpoint, or a file is missing or changed.
    """
    stored = verify_checkpoint(folder)
    names = TrainingState.__dataclass_fields__
    try:
        fields = {name: stored[name] for name in names}
        state = TrainingState(**{**fields, "block_sizes_done": tuple(fields["block_sizes_done"])})
        tensors = safetensors.torch.load_file(folder / OPTIMIZER_NAME)
    except (KeyError, TypeError, ValueError, OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"the checkpoint cannot be read: {error}", given=str(folder)) from None
    return state, tensors


def verify_checkpoint(folder: Path, *, skip: Collection[str] = ()) -> dict[str, Any]:
    """The content of `training.json`, after every file's digest was checked.

    Args:
        skip: files that will not be read, such as the optimizer's where the model is only decoded with.

    Raises:
        CheckpointError: see `read_checkpoint`.
    """
    fix = "Use another checkpoint"
    marker = folder / COMPLETE_NAME
    if not marker.is_file():
        raise CheckpointError("not a complete checkpoint", given=str(folder), fix=fix)
    stored = read_json(folder / STATE_NAME, error=CheckpointError)
    if (
        marker.read_bytes().strip() != sha256_file(folder / STATE_NAME).encode()
        or not isinstance(stored, dict)
        or not isinstance(stored.get("files"), dict)
    ):
        raise CheckpointError(f"{STATE_NAME} was changed", given=str(folder), fix=fix)
    for name, digest in stored["files"].items():
        path = folder / name
        if name in skip:
            continue
        if not path.is_file() or sha256_file(path) != digest:
            raise CheckpointError(f"{name} is missing or was changed", given=str(folder), fix=fix)
    return dict(stored)


def read_state_digest(folder: Path) -> str:
    """SHA-256 of a complete checkpoint's `training.json`, which holds the digest of every other file."""
    return (folder / COMPLETE_NAME).read_text(encoding="utf-8").strip()


def restore_set_aside(out_dir: Path) -> None:
    """Put back a checkpoint whose replacement was killed after the old one was set aside, before the new one came."""
    for older in (out_dir / CHECKPOINTS_DIR).glob(f"*{OLDER_MARK}"):
        folder = older.with_name(older.name.partition(PARTIAL_MARK)[0])
        if (older / COMPLETE_NAME).is_file() and not folder.exists():
            older.rename(folder)


def prune_checkpoints(out_dir: Path, keep_last: int, *, up_to: int) -> None:
    """Delete all but the newest complete checkpoints of steps up to `up_to`, and what killed writers left.

    Those of later steps are of a lost continuation and may be damaged: they neither count nor go.
    """
    restore_set_aside(out_dir)
    for path in [path for path in list_checkpoints(out_dir) if step_of(path) <= up_to][:-keep_last]:
        # The marker goes first: a half-deleted folder is never taken for a checkpoint.
        (path / COMPLETE_NAME).unlink()
        shutil.rmtree(path)
    for path in (out_dir / CHECKPOINTS_DIR).glob(f"*{PARTIAL_MARK}*"):
        shutil.rmtree(path, ignore_errors=True)
