"""Kill a process, or all ranks of a job, that do nothing but save checkpoints, at random moments; recover after each.

Recovered means: every listed checkpoint reads back with all digests right, its model loads, model, optimizer and
state are of the same step, and the newest is no older than the last one that the killed process called saved. Ranks
write parts of sharded tensors; one of them dies a little before the others. The last line is one JSON document.

    python tests/train/kill_check.py 50
    python tests/train/kill_check.py 50 --ranks 2
"""

import argparse
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch

from ar2diff.models.loading import load_model
from ar2diff.seeding import keyed_generator
from ar2diff.testing.models import tiny_diffusion, tiny_model
from ar2diff.train.checkpoint import (
    TrainingState,
    checkpoint_dir,
    list_checkpoints,
    read_checkpoint,
    restore_set_aside,
)
from ar2diff.train.parallel import Ranks
from ar2diff.train.saving import save_step


class Saver:
    """A model and an optimizer whose every number is the step."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.loaded = ranks, tiny_model(0)
        ranks.shard(self.loaded.decoder)
        layers = dict(self.loaded.decoder.layers.named_parameters())
        self.moments = {f"{name}.exp_avg": torch.zeros_like(weight) for name, weight in layers.items()}

    @torch.no_grad()
    def save(self, out: Path, step: int) -> None:
        """One checkpoint."""
        for tensor in (*self.loaded.decoder.parameters(), *self.moments.values()):
            tensor.fill_(float(step))
        state = TrainingState(
            step=step, elapsed_s=0.0, base_tensor_root="a", config_sha256="b", block_sizes_done=(4,)
        )
        save_step(out, self.loaded, tiny_diffusion(), self.moments, state, keep_last=2, ranks=self.ranks)


def save_until_killed(out: Path, first_step: int, report: int, ranks: Ranks) -> None:
    """Save step after step, each twice, and report the finished ones through a pipe."""
    saver, step = Saver(ranks), first_step
    if ranks.is_first:
        os.write(report, b"ready\n")
    while True:
        for _ in range(2):
            saver.save(out, step)
            if ranks.is_first:
                os.write(report, f"{step}\n".encode())
        step += 1


def newest_step(out: Path) -> int:
    """The step of the newest checkpoint, after all were read back."""
    steps = [0]
    restore_set_aside(out)
    for folder in list_checkpoints(out):
        state, tensors = read_checkpoint(folder)
        weights = load_model(folder).decoder.state_dict()
        values = {float(value) for tensor in (*weights.values(), *tensors.values()) for value in tensor.unique()}
        if values != {float(state.step)} or folder != checkpoint_dir(out, state.step):
            raise SystemExit(f"{folder} mixes steps: {values}, {state.step}")
        steps.append(state.step)
    return max(steps)


def start(out: Path, first_step: int, count: int, report: int) -> list[int]:
    """The pids of `count` ranks that save."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            # A rank whose peer is gone ends with an error; its words are not wanted here.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                save_until_killed(out, first_step, report, Ranks.join("cpu") if count > 1 else Ranks())
            finally:
                os._exit(1)
        pids.append(pid)
    return pids


def kill_once(out: Path, first_step: int, delay_s: float, victims: list[int]) -> int:
    """Let ranks save for `delay_s`, kill them in the order of `victims`; returns the last step they called saved."""
    reader, writer = os.pipe()
    pids = start(out, first_step, len(victims), writer)
    os.close(writer)
    ready = os.read(reader, 6)
    time.sleep(delay_s)
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
        time.sleep(0.01)
    for pid in pids:
        os.waitpid(pid, 0)
    with os.fdopen(reader) as stream:
        saved = stream.read().split()
    if ready != b"ready\n":
        raise SystemExit("the ranks did not start")
    return int(saved[-1]) if saved else first_step - 1


def main() -> None:
    """Print one JSON document; the exit status is 1 where a moment was not recovered from."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("moments", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    generator = keyed_generator("kill check", time.time_ns())
    recovered, in_the_middle, last = 0, 0, 1
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        saver = Saver(Ranks())
        saver.save(out, 1)
        started = time.monotonic()
        saver.save(out, 1)
        # Parts take about four times as long.
        save_s = (time.monotonic() - started) * (1 if options.ranks == 1 else 4)
        for _ in range(options.moments):
            victims = generator.permutation(options.ranks).tolist()
            saved = kill_once(out, last + 1, save_s * (0.3 + 4 * generator.random()), victims)
            in_the_middle += any((out / "checkpoints").glob("*.partial*"))
            newest = newest_step(out)
            recovered += newest >= max(saved, last)
            last = newest
    found = {
        "benchmark": "kill_check",
        "ranks": options.ranks,
        "moments": options.moments,
        "recovered": recovered,
        "with_a_checkpoint_half_written": in_the_middle,
        "last_step": last,
        "hardware": {"device": platform.machine(), "cpus": os.cpu_count()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(found))
    sys.exit(recovered != options.moments)


if __name__ == "__main__":
    main()
