"""How near the training speed that `ar2diff doctor` promises comes to the training's own.

In turns, in one process: the doctor's trial, on a random slice of the model, then optimizer steps of the real trainer
on the run's own base and data, with the settings of its recipe. Both count computed positions of all streams.

    python benchmarks/doctor_speed.py runs/quickstart
    python benchmarks/doctor_speed.py --quick

--quick takes a tiny random base and shard in place of a run's. The last line of standard output is one JSON document.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

import pydantic
import torch

from ar2diff import __version__
from ar2diff.clock import SystemClock
from ar2diff.data.stream import RowStream
from ar2diff.errors import RunError
from ar2diff.files import read_json
from ar2diff.models.loading import LoadedModel, load_model, save_model
from ar2diff.testing.models import tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.config import TrainConfig
from ar2diff.train.estimates import measure_speed
from ar2diff.train.parallel import Ranks
from ar2diff.train.trainer import Trainer

# Whoever plans an evening by the promise can live with this factor, up or down.
BAR = 1.5


def make_tiny(folder: Path) -> tuple[Path, Path, TrainConfig]:
    """A base, a shard and settings that fit in seconds."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 4, "head_dim": 64}
    save_model(folder / "base", tiny_model(0, **shape), None)
    write_tiny_shard(folder / "data")
    return folder / "base", folder / "data", TrainConfig(steps=1, micro=4, row_len=64)


def read_run(run: Path) -> tuple[Path, Path, TrainConfig]:
    """The base, the data and the settings of a run that began to train."""
    base = run / "base"
    content = read_json(run / "run.json", error=RunError)["config"]
    found = base if (base / "config.json").is_file() else next(base.glob("*.gguf"))
    return found, run / "data", pydantic.TypeAdapter(TrainConfig).validate_python(content)


def measure_steps(trainer: Trainer, count: int) -> float:
    """Positions a second over `count` steps, each with its own rows."""
    reports = [trainer.train_step() for _ in range(count)]
    return sum(report.num_tokens for report in reports) / sum(report.step_s for report in reports)


def measure(
    loaded: LoadedModel, data: Path, train: TrainConfig, *, rounds: int, steps: int
) -> dict[str, list[float]]:
    """What is promised and what is reached, round by round."""
    clock = SystemClock()
    config = loaded.config
    stream = RowStream(data, row_len=train.row_len, seed=train.seed)
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(train, loaded, stream, Path(out), clock=clock, ledger=None, progress=None, ranks=Ranks())
        trainer.decoder.train()
        measure_steps(trainer, 1)
        found: dict[str, list[float]] = {"promised": [], "reached": []}
        for _ in range(rounds):
            found["promised"].append(
                measure_speed(
                    config, train, mask_token_id=trainer.mask_token_id, clock=clock, device="cpu", limit_s=20.0
                )
            )
            found["reached"].append(measure_steps(trainer, steps))
            print(f"promised {found['promised'][-1]:.0f}, reached {found['reached'][-1]:.0f} positions/s", flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="folder of a run that began to train")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps a round")
    parser.add_argument("--quick", action="store_true", help="a tiny random model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        is_tiny = options.quick or options.run is None
        base, data, train = make_tiny(Path(scratch)) if is_tiny else read_run(options.run)
        found = measure(load_model(base), data, train, rounds=options.rounds, steps=options.steps)
    promised, reached = (statistics.median(found[name]) for name in ("promised", "reached"))
    factor = max(promised / reached, reached / promised)
    bars = [
        {
            "name": "promised and reached speed, the greater over the smaller",
            "value": round(factor, 3),
            "bar": BAR,
            "better": "lower",
            "holds": factor <= BAR,
        }
    ]
    print(
        json.dumps(
            {
                "benchmark": "doctor_speed",
                "bars": bars,
                "promised_over_reached": round(promised / reached, 3),
                "positions_per_s": found,
                "train": train.as_json(),
                "hardware": {
                    "device": platform.machine(),
                    "cpus": os.cpu_count(),
                    "threads": torch.get_num_threads(),
                },
                "versions": {"ar2diff": __version__, "torch": torch.__version__, "python": platform.python_version()},
                "quick": is_tiny,
            }
        )
    )


if __name__ == "__main__":
    main()
