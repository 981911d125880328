"""`python tests/serve/soak.py [--minutes 30] [--out RESULT]`: a served tiny model at saturation: no growth, no leak.

Twelve clients in a closed loop on eight places: answers whole and streamed, answers in a form, clients that leave and
requests that are refused, all against one process of `ar2diff serve`. Its memory, descriptors and threads are read
from /proc every few seconds. The last line printed is JSON.
"""

import argparse
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx2
import numpy as np

from ar2diff import __version__
from ar2diff.models.loading import save_model
from ar2diff.testing.models import tiny_diffusion, tiny_model

NUM_CLIENTS = 12
SAMPLE_S = 5.0
KEPT_OPEN_S = 12.0
"""After so long without a request the server closes a connection."""
WARM_UP_SHARE = 0.2
WARM_UP_S = 10.0
MAX_SLOPE = 0.01
KINDS = ("whole", "whole", "stream", "stream", "form", "leave", "leave", "refused")
PATH = "/v1/chat/completions"


class Server:
    """`ar2diff serve` as a process of its own."""

    def __init__(self, model):
        command = [sys.executable, "-m", "ar2diff", "serve", str(model), "--port", "0", "--precision", "fp32"]
        self.run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        address = next(line.split()[1] for line in self.run.stdout if line.startswith("address"))
        self.url = address.removesuffix("/v1")
        self.port = int(self.url.rpartition(":")[2])
        self.proc = Path(f"/proc/{self.run.pid}")

    def sample(self):
        """Resident bytes, open descriptors, threads."""
        pages = int((self.proc / "statm").read_text().split()[1])
        counts = [len(list((self.proc / name).iterdir())) for name in ("fd", "task")]
        return pages * os.sysconf("SC_PAGE_SIZE"), *counts

    def read_gauges(self):
        """What it says of itself."""
        text = httpx2.get(f"{self.url}/metrics").text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def settle(self):
        """What is held once nobody asks."""
        time.sleep(KEPT_OPEN_S)
        gauges = self.read_gauges()
        time.sleep(KEPT_OPEN_S)
        held = {name: gauges[f"ar2diff_{name}"] for name in ("running", "waiting", "kv_use")}
        _, descriptors, threads = self.sample()
        return {**held, "descriptors": descriptors, "threads": threads}

    def stop(self):
        """Ask it to end; its exit status."""
        self.run.send_signal(signal.SIGTERM)
        return self.run.wait(40)


def soak(model, minutes):
    """Load for so many minutes; what was seen meanwhile and is left afterwards."""
    server = Server(model)
    try:
        # What is opened or loaded once, such as the grammar library or a pool's threads, is no leak.
        load_for(server.port, WARM_UP_S, Counter())
        before = server.settle()
        counts, stop = Counter(), threading.Event()
        clients = start_clients(server.port, counts, stop)
        samples, started = [], time.monotonic()
        while (now := time.monotonic() - started) < 60 * minutes:
            samples.append((now, *server.sample(), server.read_gauges()["ar2diff_running"]))
            time.sleep(min(SAMPLE_S, minutes))
        stop.set()
        [client.join() for client in clients]
        after = server.settle()
    finally:
        code = server.stop()
    return describe(minutes, samples, counts, before, after, code)


def start_clients(port, counts, stop):
    """All clients, asking."""
    clients = [threading.Thread(target=ask_on, args=(port, idx, counts, stop)) for idx in range(NUM_CLIENTS)]
    [client.start() for client in clients]
    return clients


def load_for(port, seconds, counts):
    """The same load for a while."""
    stop = threading.Event()
    clients = start_clients(port, counts, stop)
    time.sleep(seconds)
    stop.set()
    [client.join() for client in clients]


def ask_on(port, idx, counts, stop):
    """One client: ask, wait, ask again."""
    draw = random.Random(idx)
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        while not stop.is_set():
            kind = draw.choice(KINDS)
            counts[f"{kind}: {ask(http, port, kind, draw)}"] += 1


def ask(http, port, kind, draw):
    """One request of a kind; a word for what came of it."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "".join(draw.choices("abcdef ", k=draw.randrange(1, 60)))}],
        "max_tokens": draw.randrange(1, 60),
        "n": draw.choice((1, 1, 1, 2)),
        "diffusion": {"mode": draw.choice(("diffusion", "verified", "ar"))},
    }
    if kind == "leave":
        return leave(port, body | {"stream": draw.random() < 0.5}, draw.uniform(0, 0.05))
    if kind == "refused":
        body["temperature"] = draw.choice((-1, "x", 3))
    if kind == "form":
        schema = {"type": "array", "items": {"type": "integer"}, "maxItems": draw.randrange(1, 9)}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    got = http.post(PATH, json=body | {"stream": kind == "stream"})
    if got.status_code == 200 and kind == "stream":
        return "ended" if got.text.endswith("data: [DONE]\n\n") else "cut"
    return str(got.status_code)


def leave(port, body, after_s):
    """Ask and go away soon."""
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        time.sleep(after_s)
    return "left"


def describe(minutes, samples, counts, before, after, code):
    """The document."""
    used = [sample for sample in samples if sample[0] >= 60 * minutes * WARM_UP_SHARE]
    seconds, resident = np.array([s[0] for s in used]), np.array([s[1] for s in used])
    slope = float(np.polyfit(seconds, resident, 1)[0]) * 600 / float(resident.mean())
    wanted = {"whole: 200", "stream: ended", "form: 200", "leave: left", "refused: 400"}
    leaked = {name: max(0.0, after[name] - before[name]) for name in after}
    bars = [
        ("memory slope, share in 10 minutes", slope, MAX_SLOPE),
        ("places and KV memory still held", after["running"] + after["waiting"] + after["kv_use"], 0),
        ("descriptors leaked", leaked["descriptors"], 0),
        ("threads leaked", leaked["threads"], 0),
        ("answers of another kind than asked for", sum(counts[name] for name in counts.keys() - wanted), 0),
        ("exit status after SIGTERM", abs(code), 0),
    ]
    step = max(1, len(samples) // 60)
    return {
        "benchmark": "soak",
        "bars": [
            {"name": name, "value": round(value, 5), "bar": bar, "better": "lower", "holds": value <= bar}
            for name, value, bar in bars
        ],
        "minutes": minutes,
        "clients": NUM_CLIENTS,
        "requests": dict(sorted(counts.items())),
        "mean_running": round(float(np.mean([s[4] for s in samples])), 2),
        "before": before,
        "after": after,
        "resident_mib": [round(s[1] / 2**20, 2) for s in samples[::step]],
        "warm_up_share_left_out": WARM_UP_SHARE,
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version(), "ar2diff": __version__},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="20 s: shows that it runs, not that memory stays")
    parser.add_argument("--out", type=Path, help="also write the document here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        save_model(model, tiny_model(3), tiny_diffusion())
        document = soak(model, 1 / 3 if options.quick else options.minutes)
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
