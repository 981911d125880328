"""How fast the ledger takes events: `python benchmarks/ledger.py [--quick]`; the last line printed is JSON.

The bar is 20,000 events a second with an fsync every 100 events. The folder must lie on a real disk to mean anything.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from ar2diff import __version__
from ar2diff.clock import SystemClock
from ar2diff.provenance.ledger import Ledger, read_ledger

FSYNC_EVERY = 100
BAR_EVENTS_PER_S = 20_000


def measure_append(folder: Path, num_events: int, fsync_every: int = FSYNC_EVERY) -> float:
    """Events a second, with one durable append in each `fsync_every`."""
    with Ledger.open(folder, clock=SystemClock(), run_id="benchmark") as ledger:
        started_s = time.perf_counter()
        for index in range(num_events):
            data = {"step": index, "loss": 1.25, "batch_sha256": "ab" * 32}
            ledger.append("train_step", data, durable=index % fsync_every == fsync_every - 1)
        return num_events / (time.perf_counter() - started_s)


def measure_fsync_ms(folder: Path) -> float:
    """Milliseconds of the disk's own fsync after as many bytes as `FSYNC_EVERY` events: the floor of the above."""
    with (folder / "raw").open("wb", buffering=0) as stream:
        started_s = time.perf_counter()
        for _ in range(50):
            stream.write(b"x" * 300 * FSYNC_EVERY)
            os.fsync(stream.fileno())
        return (time.perf_counter() - started_s) / 50 * 1e3


def measure_verify(folder: Path) -> float:
    """Verified lines a second."""
    started_s = time.perf_counter()
    num_lines = sum(1 for _ in read_ledger(folder / "ledger.jsonl"))
    return num_lines / (time.perf_counter() - started_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20,000 events instead of 200,000")
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    arguments = parser.parse_args()
    num_events = 20_000 if arguments.quick else 200_000
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        appends = [measure_append(Path(folder) / str(trial), num_events) for trial in range(5)]
        without_fsync = measure_append(Path(folder) / "without", num_events, fsync_every=num_events + 1)
        fsync_ms = measure_fsync_ms(Path(folder))
        verified = measure_verify(Path(folder) / "0")
    best = max(appends)
    bar = {
        "name": "ledger_events_per_s",
        "value": round(best),
        "bar": BAR_EVENTS_PER_S,
        "better": "higher",
        "holds": best >= BAR_EVENTS_PER_S,
    }
    document = {
        "benchmark": "ledger",
        "bars": [bar],
        "appends_per_s": [round(value) for value in appends],
        "fsync_ms": round(fsync_ms, 2),
        "appends_per_s_without_fsync": round(without_fsync),
        "verified_lines_per_s": round(verified),
        "num_events": num_events,
        "fsync_every": FSYNC_EVERY,
        "hardware": {"machine": platform.machine(), "num_cpus": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "ar2diff": __version__,
            "rfc8785": version("rfc8785"),
        },
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
