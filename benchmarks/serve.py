"""What the server costs: the same requests over HTTP and to the engine called directly, in turns within one run.

Both sides are processes of their own with the same model, precision and threads; one rests while the other works.
Closed loop: 1, 8 and 32 clients, each asks again once it has its answer. Open loop: requests arrive at random
moments, at a share of what 8 clients got, whether answers are out or not. Then clients leave at random moments.

The clients of the server run here, so the engine gets all cores but one unless told otherwise. Every prompt is new to
both sides: prefixes that the engine keeps help nobody. An answer is always of full length. The last line of standard
output is one JSON document.

    python benchmarks/serve.py --model runs/quickstart/checkpoints/step-000035 --out benchmarks/results/serve.json
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
from serve_load import Load, cancel_storm, time_to_cancel

from ar2diff import __version__
from ar2diff.models.loading import save_model
from ar2diff.testing.models import tiny_diffusion, tiny_model

Reply = dict[str, Any]
HERE = Path(__file__).parent
NAME = "served"
MODES: dict[str, Reply] = {
    "diffusion": {"mode": "diffusion", "policy": "top_k", "denoising_steps": 4},
    "ar": {"mode": "ar"},
}
WORDS = ("alpha", "river", "seven", "cloud", "paper", "green", "stone", "under", "music", "walk", "light", "bread")
OPEN_SHARES = (0.5, 0.8)
MAX_OVERHEAD = 0.05


class Direct:
    """The engine in a process of its own, asked by JSON lines."""

    def __init__(self, model: Path, precision: str, threads: int) -> None:
        command = [sys.executable, str(HERE / "serve_child.py"), str(model), precision]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._child = subprocess.Popen(command, env=with_threads(threads), text=True, **pipes)
        self.about = self._read()

    def run(self, asked: Sequence[Reply], *, clients: int = 0) -> Reply:
        """Answer requests: so many at a time, or each at its own moment."""
        return self._ask({"asked": list(asked), "clients": clients})

    def close(self) -> None:
        """End it."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(30)

    def _ask(self, line: Reply) -> Reply:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(line) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> Reply:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"the engine's process ended with status {self._child.wait()}")
        reply: Reply = json.loads(line)
        return reply


class Served:
    """`ar2diff serve` as a process of its own, and the load on it."""

    def __init__(self, model: Path, precision: str, threads: int) -> None:
        options = ["--port", "0", "--name", NAME, "--precision", precision]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "ar2diff", "serve", str(model), *options],
            env=with_threads(threads),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._child.stdout is not None
        address = next((line.split()[1] for line in self._child.stdout if line.startswith("address")), None)
        if address is None:
            raise SystemExit(f"the server ended with status {self._child.wait()}")
        self.port = httpx2.URL(address).port

    def run(self, asked: Sequence[Reply], *, clients: int = 0) -> Reply:
        """As `Direct.run`, over HTTP, streamed."""
        return asyncio.run(Load(self.port, NAME).run(asked, clients=clients))

    def close(self) -> int:
        """Stop it; returns its exit status."""
        self._child.terminate()
        return self._child.wait(60)


def with_threads(threads: int) -> dict[str, str]:
    """This environment with another number of threads."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def draw_requests(turn: str, count: int, max_tokens: int, settings: Reply, end_ids: Sequence[int]) -> list[Reply]:
    """Requests of one turn: the same for both sides, new to both; an end of turn never comes."""
    draw = random.Random(turn)
    prompts = [" ".join(draw.choices(WORDS, k=24)) for _ in range(count)]
    bias = {str(idx): -100 for idx in end_ids}
    return [{"prompt": p, "max_tokens": max_tokens, "logit_bias": bias, "settings": settings} for p in prompts]


def measure_closed(sides: dict[str, Any], options: argparse.Namespace, mode: str, clients: int) -> Reply:
    """Both sides with so many clients, in turns."""
    found: dict[str, list[Reply]] = {name: [] for name in sides}
    turns = options.turns if clients == 8 else 1
    for turn in range(turns):
        name = f"closed {mode} {clients} {turn}"
        count = clients * options.rounds if clients > 1 else 3
        asked = draw_requests(name, count, options.max_tokens, MODES[mode], options.end_ids)
        for side, one in sorted(sides.items(), reverse=bool(turn % 2)):
            found[side].append(one.run(asked, clients=clients))
    return compare(found)


def measure_open(sides: dict[str, Any], options: argparse.Namespace, rate: float) -> Reply:
    """Both sides with requests that arrive at a rate, in requests a second."""
    count = options.open_requests
    asked = draw_requests(f"open {rate}", count, options.max_tokens, MODES["diffusion"], options.end_ids)
    draw, at_s = random.Random(0), 0.0
    for one in asked:
        one["at_s"] = at_s
        at_s += draw.expovariate(rate)
    return {"requests_per_s": round(rate, 3), **compare({side: [one.run(asked)] for side, one in sides.items()})}


def compare(found: dict[str, list[Reply]]) -> Reply:
    """Rates and percentiles of each side, and what the server keeps of the engine's rate."""
    sides = {side: summarise(turns) for side, turns in found.items()}
    share = sides["server"]["tokens_per_s"] / sides["engine"]["tokens_per_s"]
    return {**sides, "share_of_engine": round(share, 4)}


def summarise(turns: list[Reply]) -> Reply:
    """Tokens a second over all turns; percentiles over all answers, in milliseconds."""
    answers = [answer for turn in turns for answer in turn["answers"]]
    tokens, seconds = sum(answer["tokens"] for answer in answers), sum(turn["seconds"] for turn in turns)
    slots = [(a["end_s"] - a["first_s"]) / (a["tokens"] - 1) for a in answers if a["tokens"] > 1]
    return {
        "tokens_per_s": round(tokens / seconds, 3),
        "num_answers": len(answers),
        "num_tokens": tokens,
        "first_token_ms": percentiles([answer["first_s"] for answer in answers]),
        "token_ms": percentiles(slots),
    }


def percentiles(seconds: Sequence[float]) -> Reply:
    """The 50th, 95th and 99th, by nearest rank, in milliseconds."""
    ordered = sorted(seconds)
    rank = {p: ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))] for p in (50, 95, 99)}
    return {f"p{p}": round(1000 * value, 1) for p, value in rank.items()}


def measure_leaving(served: Served, direct: Direct, options: argparse.Namespace) -> Reply:
    """A storm of clients that leave, then single ones, whose place must be free within a pass."""
    asked = draw_requests("storm", options.leavers, 64, MODES["diffusion"], options.end_ids)
    storm = asyncio.run(cancel_storm(served.port, NAME, asked))
    alone = draw_requests("alone", options.alone, 64, MODES["diffusion"], options.end_ids)
    freed = asyncio.run(time_to_cancel(served.port, NAME, alone))
    longest_s = direct.run(alone[:3], clients=1)["longest_pass_s"]
    return {
        "storm": storm,
        "seconds_to_cancel": {**percentiles(freed["seconds"]), "unit": "milliseconds"},
        "round_trip_ms": round(1000 * freed["round_trip_s"], 2),
        "longest_pass_ms": round(1000 * longest_s, 1),
    }


def list_bars(document: Reply) -> list[Reply]:
    """What is asked of these numbers, and whether it holds."""
    closed, leaving = document["closed"], document["leaving"]
    free = leaving["seconds_to_cancel"]["p95"] - leaving["round_trip_ms"]
    storm = leaving["storm"]
    least = 1 - MAX_OVERHEAD
    bars = [
        (
            "share of the engine's rate, 8 clients, diffusion",
            closed["diffusion 8"]["share_of_engine"],
            least,
            "higher",
        ),
        ("share of the engine's rate, 8 clients, ar", closed["ar 8"]["share_of_engine"], least, "higher"),
        ("places and KV memory held after the storm", storm["held"] + storm["kv_use"], 0, "lower"),
        ("seconds to an answer after the storm", storm["next_answer_s"], 5, "lower"),
        ("time to cancel over the longest pass, p95", free / leaving["longest_pass_ms"], 1, "lower"),
        ("answers that failed", document["num_failed"], 0, "lower"),
    ]
    return [
        {
            "name": name,
            "value": round(value, 4),
            "bar": bar,
            "better": better,
            "holds": value >= bar if better == "higher" else value <= bar,
        }
        for name, value, bar, better in bars
    ]


def report(options: argparse.Namespace, model: Path) -> Reply:
    """Everything, measured."""
    start_s = time.perf_counter()
    direct = Direct(model, options.precision, options.threads)
    served = Served(model, options.precision, options.threads)
    options.end_ids = direct.about["end_ids"]
    sides = {"engine": direct, "server": served}
    try:
        warm = draw_requests("warm", 2, 8, MODES["ar"], options.end_ids)
        for one in sides.values():
            one.run(warm, clients=2)
        closed = {f"diffusion {n}": measure_closed(sides, options, "diffusion", n) for n in (1, 8, 32)}
        closed["ar 8"] = measure_closed(sides, options, "ar", 8)
        capacity = closed["diffusion 8"]["engine"]["tokens_per_s"] / options.max_tokens
        opened = {f"{share:.0%}": measure_open(sides, options, share * capacity) for share in OPEN_SHARES}
        leaving = measure_leaving(served, direct, options)
    finally:
        direct.close()
        status = served.close()
    failed = sum(turn["server"].pop("num_failed", 0) for turn in (*closed.values(), *opened.values()))
    document: Reply = {
        "benchmark": "serve",
        "bars": [],
        "closed": closed,
        "open": opened,
        "leaving": leaving,
        "num_failed": failed,
        "exit_status": status,
        "model": "converted run" if options.model else "random model",
        "precision": direct.about["precision"],
        "settings": {name: getattr(options, name) for name in ("max_tokens", "rounds", "turns", "open_requests")},
        "modes": MODES,
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads_of_the_engine": options.threads},
        "load_average": round(os.getloadavg()[0], 2),
        "quick": options.quick,
        "versions": {
            "python": platform.python_version(),
            "ar2diff": __version__,
            **{n: version(n) for n in ("torch", "uvicorn")},
        },
        "seconds": round(time.perf_counter() - start_s, 1),
    }
    document["bars"] = list_bars(document)
    return document


def save_random_model(folder: Path, *, is_small: bool) -> Path:
    """A random llama of the quickstart model's width; a small one has few layers and words."""
    diffusion = tiny_diffusion(block_size=8, trained_block_sizes=(8,))
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    layers, words = (2, 2048) if is_small else (30, 49152)
    loaded = tiny_model(0, diffusion=diffusion, vocab_size=words, max_seq_len=2048, num_layers=layers, **sizes)
    save_model(folder, loaded, diffusion)
    return folder


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few requests to a small model: under a minute")
    parser.add_argument("--model", type=Path, help="a converted model's folder; a random one unless given")
    parser.add_argument("--precision", default="auto", help="of both sides, as in ar2diff serve")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="of the engine")
    parser.add_argument("--out", type=Path, help="also write the document here")
    options = parser.parse_args()
    quick = options.quick
    options.max_tokens, options.rounds, options.turns = (12, 1, 1) if quick else (24, 2, 2)
    options.open_requests, options.leavers, options.alone = (6, 16, 3) if quick else (14, 100, 20)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or save_random_model(Path(folder) / "model", is_small=quick)
        document = report(options, model)
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
