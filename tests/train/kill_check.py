"""Kill a process that does nothing but save checkpoints, at random moments, and recover after each.

Recovered means: every listed checkpoint reads back with all digests right, its model loads, model, optimizer and
state are of the same step, and the newest is no older than the last one that the killed process called saved.

    python tests/train/kill_check.py 50
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from ar2diff.models.loading import load_model, save_model
from ar2diff.seeding import keyed_generator
from ar2diff.testing.models import tiny_diffusion, tiny_model
from ar2diff.train.checkpoint import (
    TrainingState,
    checkpoint_dir,
    list_checkpoints,
    prune_checkpoints,
    read_checkpoint,
    restore_set_aside,
    write_checkpoint,
)

NORM = "final_norm.weight"


def save(out: Path, step: int) -> None:
    """A checkpoint whose every part tells its step."""
    loaded = tiny_model(0)
    loaded.decoder.get_parameter(NORM).data.fill_(float(step))
    write_checkpoint(
        checkpoint_dir(out, step),
        write_model=lambda folder: save_model(folder, loaded, tiny_diffusion()),
        optimizer={"w.exp_avg": torch.full((50_000,), float(step))},
        state=TrainingState(step=step, elapsed_s=0.0, base_tensor_root="a", config_sha256="b", block_sizes_done=(4,)),
    )
    prune_checkpoints(out, 2)


def save_until_killed(out: Path, first_step: int, report: int) -> None:
    """Save step after step, each twice, and report the finished ones through a pipe."""
    step = first_step
    while True:
        for _ in range(2):
            save(out, step)
            os.write(report, f"{step}\n".encode())
        step += 1


def newest_step(out: Path) -> int:
    """The step of the newest checkpoint, after all were read back."""
    steps = [0]
    restore_set_aside(out)
    for folder in list_checkpoints(out):
        state, tensors = read_checkpoint(folder)
        weight = load_model(folder).decoder.get_parameter(NORM).detach()
        values = {float(value) for value in (*weight, *tensors["w.exp_avg"])}
        if values != {float(state.step)} or folder != checkpoint_dir(out, state.step):
            raise SystemExit(f"{folder} mixes steps: {values}, {state.step}")
        steps.append(state.step)
    return max(steps)


def kill_once(out: Path, first_step: int, delay_s: float) -> int:
    """Let a child save for `delay_s`, kill it, and return the last step that it called saved."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_until_killed(out, first_step, writer)
    os.close(writer)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        saved = stream.read().split()
    return int(saved[-1]) if saved else first_step - 1


def main(num_moments: int) -> None:
    """Print one JSON document; the exit status is 1 where a moment was not recovered from."""
    generator = keyed_generator("kill check", time.time_ns())
    recovered, last = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        started = time.monotonic()
        save(out, 1)
        save_s = time.monotonic() - started
        last = 1
        for _ in range(num_moments):
            saved = kill_once(out, last + 1, save_s * (0.3 + 4 * generator.random()))
            newest = newest_step(out)
            recovered += newest >= max(saved, last)
            last = newest
    print(json.dumps({"moments": num_moments, "recovered": recovered, "last_step": last, "save_s": save_s}))
    sys.exit(recovered != num_moments)


if __name__ == "__main__":
    main(int(sys.argv[1]))
