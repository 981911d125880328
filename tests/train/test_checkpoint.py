"""Checkpoints appear whole or not at all."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ar2diff.clock import SystemClock
from ar2diff.errors import CheckpointError
from ar2diff.files import write_text
from ar2diff.hashing import sha256_file
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, find_events
from ar2diff.train import sharded
from ar2diff.train.checkpoint import (
    TrainingState,
    checkpoint_dir,
    find_newest_good_checkpoint,
    is_checkpoint,
    list_checkpoints,
    list_good_checkpoints,
    prune_checkpoints,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from ar2diff.train.parallel import Ranks

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
    prune_checkpoints(tmp_path, 3, up_to=4)
    assert not left.exists()
    with pytest.raises(CheckpointError):
        read_checkpoint(checkpoint_dir(tmp_path, 4))


def damaged_run(out):
    """Checkpoints of steps 3 and 4, the newer one with a changed byte."""
    write(out)
    newest = checkpoint_dir(out, 4)
    write_checkpoint(
        newest,
        write_model=lambda folder: write_text(folder / "model.txt", "weights") or "root",
        optimizer=OPTIMIZER,
        state=STATE,
    )
    content = bytearray((newest / "optimizer.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "optimizer.safetensors").write_bytes(content)
    return newest


def test_a_damaged_newest_checkpoint_is_an_error_for_who_names_it(tmp_path):
    newest = damaged_run(tmp_path)
    with pytest.raises(CheckpointError, match="optimizer"):
        read_checkpoint(newest)


def test_a_damaged_newest_checkpoint_is_passed_over_aloud_by_who_asks_for_a_good_one(tmp_path):
    damaged_run(tmp_path)
    with (
        Ledger.open(tmp_path, clock=SystemClock(), run_id="r") as ledger,
        pytest.warns(RuntimeWarning, match="step-000004"),
    ):
        assert find_newest_good_checkpoint(tmp_path, ledger=ledger) == checkpoint_dir(tmp_path, 3)
    (event,) = find_events(tmp_path / LEDGER_NAME, "checkpoint_skipped")
    assert event.data == {"checkpoint": "step-000004", "reason": "optimizer.safetensors is missing or was changed"}


def test_where_every_checkpoint_is_damaged_there_is_nothing_to_go_on_from(tmp_path):
    assert find_newest_good_checkpoint(tmp_path) is None
    damaged_run(tmp_path)
    (checkpoint_dir(tmp_path, 3) / "model.txt").unlink()
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match="every"):
        find_newest_good_checkpoint(tmp_path)


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from ar2diff.errors import SpaceError
from ar2diff.models.loading import save_model
from ar2diff.testing.models import tiny_diffusion, tiny_model
from ar2diff.train.checkpoint import TrainingState, checkpoint_dir, read_checkpoint, write_checkpoint
out = Path(sys.argv[1])
loaded = tiny_model(0)
def save(step, elements):
    state = TrainingState(step=step, elapsed_s=0.0, base_tensor_root="a", config_sha256="b", block_sizes_done=(4,))
    optimizer = {"w.exp_avg": torch.full((elements,), float(step))}
    write_checkpoint(checkpoint_dir(out, step), write_model=lambda f: save_model(f, loaded, tiny_diffusion()),
                     optimizer=optimizer, state=state)
save(1, 10)
# The limit stops the model's weights first, then the optimizer's tensors.
for limit, elements in ((20_000, 10), (150_000, 100_000)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for step in (1, 2):
        try:
            save(step, elements)
        except SpaceError as error:
            print(error)
read_checkpoint(checkpoint_dir(out, 1))
print(sorted(path.name for path in (out / "checkpoints").iterdir()))
"""


def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    *errors, left = done.stdout.splitlines()
    assert len(errors) == 4
    assert all("full" in error for error in errors)
    assert left == "['step-000001']"


def test_a_checkpoint_set_aside_by_a_killed_writer_comes_back(tmp_path):
    write(tmp_path)
    folder = checkpoint_dir(tmp_path, 3)
    folder.rename(folder.with_name(f"{folder.name}.partial-77.older"))
    assert find_newest_good_checkpoint(tmp_path) == folder
    read_checkpoint(folder)
    write(tmp_path)
    folder.rename(folder.with_name(f"{folder.name}.partial-77.older"))
    prune_checkpoints(tmp_path, 1, up_to=3)
    assert list_checkpoints(tmp_path) == [folder]


def test_a_writer_killed_at_random_moments_never_costs_a_finished_checkpoint():
    script = Path(__file__).with_name("kill_check.py")
    done = subprocess.run([sys.executable, script, "5"], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["recovered"] == 5


def test_the_newest_of_a_long_run_comes_last(tmp_path):
    for step in (999_999, 1_000_000):
        write_checkpoint(
            checkpoint_dir(tmp_path, step),
            write_model=lambda folder: write_text(folder / "model.txt", "weights") or "root",
            optimizer=OPTIMIZER,
            state=STATE,
        )
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_parts_are_written_in_bounded_files_and_joined_into_one_that_reads_back(tmp_path, monkeypatch):
    written = []
    whole_save = safetensors.torch.save

    def save(tensors, **options):
        written.append(sum(tensor.nbytes for tensor in tensors.values()))
        return whole_save(tensors, **options)

    monkeypatch.setattr(sharded, "PART_BYTES", 100)
    monkeypatch.setattr(safetensors.torch, "save", save)
    tensors = {f"layer{idx}": torch.full((size,), float(idx)) for idx, size in enumerate((5, 20, 1, 40, 3))}
    joined = sharded.write_joined(tensors, tmp_path / "parts", Ranks())
    assert list(joined.parent.rglob("*.safetensors")) == [joined]
    assert sorted(written) == [4 * 1, 4 * 3, 4 * (5 + 20), 4 * 40]
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    sharded.read_parts(read, joined.parent)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


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


@pytest.mark.parametrize("lost", ["training.json", "COMPLETE", "optimizer.safetensors"])
def test_a_checkpoint_that_lost_a_part_is_no_plain_model(tmp_path, lost):
    write(tmp_path)
    folder = checkpoint_dir(tmp_path, 3)
    (folder / lost).unlink()
    assert is_checkpoint(folder)
    with pytest.raises(CheckpointError):
        verify_checkpoint(folder)
    assert not is_checkpoint(tmp_path)


def write_steps(out, *steps):
    for step in steps:
        write_checkpoint(
            checkpoint_dir(out, step),
            write_model=lambda folder: write_text(folder / "model.txt", "weights") or "root",
            optimizer=OPTIMIZER,
            state=STATE,
        )


def test_a_lost_continuation_never_pushes_out_what_was_just_saved(tmp_path):
    # The run went on from step 20, because 30 is damaged; with one to keep, that one is 22.
    write_steps(tmp_path, 20, 22, 30)
    prune_checkpoints(tmp_path, 1, up_to=22)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000022", "step-000030"]


def test_the_good_checkpoints_of_a_run_are_neither_damaged_nor_of_a_lost_continuation(tmp_path):
    write_steps(tmp_path, 1, 2, 3, 4, 5)
    (checkpoint_dir(tmp_path, 3) / "model.txt").write_text("other")
    with pytest.warns(RuntimeWarning, match="step-000003"):
        found = list_good_checkpoints(tmp_path, 2, up_to=4)
    assert found == [checkpoint_dir(tmp_path, 2), checkpoint_dir(tmp_path, 4)]


def test_what_a_killed_writer_with_the_same_process_number_left_is_no_obstacle(tmp_path):
    write(tmp_path)
    folder = checkpoint_dir(tmp_path, 3)
    for mark in (f".partial-{os.getpid()}", f".partial-{os.getpid()}.older"):
        left = folder.with_name(folder.name + mark)
        left.mkdir()
        (left / "model.txt").write_text("half")
    write(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert (folder / "model.txt").read_text() == "weights"


def test_a_copy_that_a_user_made_of_a_checkpoint_is_left_alone(tmp_path):
    write_steps(tmp_path, 3, 4)
    copy = tmp_path / "checkpoints" / "step-000003-best"
    shutil.copytree(checkpoint_dir(tmp_path, 3), copy)
    assert find_newest_good_checkpoint(tmp_path) == checkpoint_dir(tmp_path, 4)
    prune_checkpoints(tmp_path, 1, up_to=4)
    assert sorted(path.name for path in copy.parent.iterdir()) == ["step-000003-best", "step-000004"]


def test_a_checkpoint_whose_deletion_was_killed_is_none(tmp_path, monkeypatch):
    def killed(path, **options):
        raise KeyboardInterrupt

    write_steps(tmp_path, 3, 4)
    monkeypatch.setattr("ar2diff.train.checkpoint.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoints(tmp_path, 1, up_to=4)
    assert (checkpoint_dir(tmp_path, 3) / "model.txt").exists()
    assert list_checkpoints(tmp_path) == [checkpoint_dir(tmp_path, 4)]


def test_a_disk_that_turned_read_only_is_an_error_that_keeps_what_was_there(tmp_path):
    def deny(folder):
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*--init"):
        write(tmp_path, deny)
    read_checkpoint(checkpoint_dir(tmp_path, 3))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
