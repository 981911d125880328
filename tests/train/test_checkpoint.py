"""Checkpoints appear whole or not at all."""

import subprocess
import sys

import pytest
import torch

from ar2diff.errors import CheckpointError
from ar2diff.files import write_text
from ar2diff.hashing import sha256_file
from ar2diff.train.checkpoint import (
    TrainingState,
    checkpoint_dir,
    is_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)

STATE = TrainingState(step=3, elapsed_s=1.5, base_tensor_root="a", config_sha256="b", block_sizes_done=(2, 4))
OPTIMIZER = {"w.exp_avg": torch.arange(3.0)}


def write(out, write_model=lambda folder: write_text(folder / "model.txt", "weights") or "root"):
    return write_checkpoint(checkpoint_dir(out, 3), write_model=write_model, optimizer=OPTIMIZER, state=STATE)


def test_what_is_written_is_read_again(tmp_path):
    assert write(tmp_path) == "root"
    state, tensors = read_checkpoint(checkpoint_dir(tmp_path, 3))
    assert state == STATE
    assert torch.equal(tensors["w.exp_avg"], OPTIMIZER["w.exp_avg"])


def test_writing_the_same_step_again_replaces_it_and_leaves_nothing_beside(tmp_path):
    write(tmp_path)
    write(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_a_failed_write_leaves_the_old_checkpoint_and_no_trace(tmp_path):
    def fail(folder):
        raise RuntimeError("model")

    write(tmp_path)
    with pytest.raises(RuntimeError):
        write(tmp_path, fail)
    read_checkpoint(checkpoint_dir(tmp_path, 3))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_swept_up(tmp_path):
    write(tmp_path)
    left = tmp_path / "checkpoints" / "step-000004.partial-77"
    checkpoint_dir(tmp_path, 3).rename(left)
    assert list_checkpoints(tmp_path) == []
    prune_checkpoints(tmp_path, 3)
    assert not left.exists()
    with pytest.raises(CheckpointError):
        read_checkpoint(checkpoint_dir(tmp_path, 4))


def test_the_newest_of_a_long_run_comes_last(tmp_path):
    for step in (999_999, 1_000_000):
        write_checkpoint(
            checkpoint_dir(tmp_path, step),
            write_model=lambda folder: write_text(folder / "model.txt", "weights") or "root",
            optimizer=OPTIMIZER,
            state=STATE,
        )
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]


@pytest.mark.parametrize("content", [b"\xff" * 65, b"", b"[]"])
def test_a_damaged_marker_is_a_checkpoint_error(tmp_path, content):
    write(tmp_path)
    (checkpoint_dir(tmp_path, 3) / "COMPLETE").write_bytes(content)
    with pytest.raises(CheckpointError, match="was changed"):
        read_checkpoint(checkpoint_dir(tmp_path, 3))


def test_a_state_that_is_no_object_is_a_checkpoint_error(tmp_path):
    write(tmp_path)
    folder = checkpoint_dir(tmp_path, 3)
    (folder / "training.json").write_text("[]")
    (folder / "COMPLETE").write_text(sha256_file(folder / "training.json"))
    with pytest.raises(CheckpointError, match="was changed"):
        read_checkpoint(folder)


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from ar2diff.errors import SpaceError
from ar2diff.train.checkpoint import TrainingState, list_checkpoints, write_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
state = TrainingState(step=3, elapsed_s=1.5, base_tensor_root="a", config_sha256="b", block_sizes_done=(2,))
out = Path(sys.argv[1])
try:
    optimizer = {"w": torch.zeros(5000)}
    folder = out / "checkpoints" / "step-000003"
    write_checkpoint(folder, write_model=lambda _: "root", optimizer=optimizer, state=state)
except SpaceError:
    print("SpaceError", list((out / "checkpoints").iterdir()))
"""


def test_a_limit_on_file_sizes_counts_as_a_full_disk_and_leaves_nothing(tmp_path):
    # In a program of its own, whose limit ends with it.
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (ended.stdout.strip(), ended.returncode) == ("SpaceError []", 0), ended.stderr


@pytest.mark.parametrize("lost", ["training.json", "COMPLETE", "optimizer.safetensors"])
def test_a_checkpoint_that_lost_a_part_is_no_plain_model(tmp_path, lost):
    write(tmp_path)
    folder = checkpoint_dir(tmp_path, 3)
    (folder / lost).unlink()
    assert is_checkpoint(folder)
    with pytest.raises(CheckpointError):
        verify_checkpoint(folder)
    assert not is_checkpoint(tmp_path)
