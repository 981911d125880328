"""Whose folder it is: a training goes on only in its own, from a checkpoint of its own."""

from pathlib import Path

from ar2diff.errors import RunError
from ar2diff.files import read_json, write_json
from ar2diff.train.checkpoint import TrainingState, list_checkpoints
from ar2diff.train.config import TrainConfig

RUN_NAME = "run.json"


def check_state(state: TrainingState | None, base_root: str, config_sha256: str, init: Path | None) -> None:
    """Refuse a checkpoint of another base or of other settings.

    Raises:
        RunError: says which.
    """
    if state is None:
        return
    if state.base_tensor_root != base_root:
        raise RunError("the checkpoint started from another base model", given=str(init), fix="Name that base")
    if state.config_sha256 != config_sha256:
        raise RunError("the checkpoint belongs to a run with other settings", given=str(init), fix="Repeat them")


def enter_run(out_dir: Path, config: TrainConfig, base_root: str, config_sha256: str, *, resuming: bool) -> None:
    """Mark the folder as this run's, or see that it is.

    Raises:
        RunError: it holds another run, or this one and `resuming` is not set.
    """
    path = out_dir / RUN_NAME
    if path.exists():
        stored = read_json(path, error=RunError)
        if (stored.get("base_tensor_root"), stored.get("config_sha256")) != (base_root, config_sha256):
            raise RunError("the folder belongs to another run", given=str(out_dir), fix="Choose another folder")
        if not resuming and (found := list_checkpoints(out_dir)):
            raise RunError(
                "the folder holds this run already", given=str(out_dir), fix=f"Go on with --init {found[-1]}"
            )
        return
    if list_checkpoints(out_dir):
        raise RunError("the folder holds checkpoints of an unknown run", given=str(out_dir), fix="Choose another")
    write_json(path, {"base_tensor_root": base_root, "config_sha256": config_sha256, "config": config.as_json()})
