"""`python tests/serve/soak.py MINUTES [RESULT]`: a served tiny model at saturation: no growth, no leak.

Twelve clients in a closed loop: answers whole and streamed, clients that leave, refused requests, all in one process
`ar2diff serve`. Memory and descriptors are read from /proc every few seconds. The last line printed is JSON.
"""

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
WARM_UP_SHARE = 0.2
MAX_SLOPE = 0.01


def main():
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        save_model(model, tiny_model(3), tiny_diffusion())
        document = soak(model, minutes)
    text = json.dumps(document)
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(text + "\n", encoding="utf-8")
    print(text)


def soak(model, minutes):
    server = Server(model)
    try:
        counts, stop = Counter(), threading.Event()
        clients = [
            threading.Thread(target=ask_on, args=(server.port, idx, counts, stop)) for idx in range(NUM_CLIENTS)
        ]
        at_rest = server.sample()
        [client.start() for client in clients]
        samples, started = [], time.monotonic()
        while time.monotonic() - started < 60 * minutes:
            time.sleep(min(SAMPLE_S, minutes * 6))
            samples.append((time.monotonic() - started, *server.sample()))
        stop.set()
        [client.join() for client in clients]
        end = server.settle()
    finally:
        code = server.stop()
    return describe(minutes, samples, counts, at_rest, end, code)


class Server:
    """`ar2diff serve` as a process of its own."""

    def __init__(self, model):
        command = [sys.executable, "-m", "ar2diff", "serve", str(model), "--port", "0", "--precision", "fp32"]
        self.run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        address = next(line.split()[1] for line in self.run.stdout if line.startswith("address"))
        self.url, self.port = address, int(address.rpartition(":")[2].split("/")[0])
        self.proc = Path(f"/proc/{self.run.pid}")

    def sample(self):
        """Resident bytes and open descriptors."""
        pages = int((self.proc / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(list((self.proc / "fd").iterdir()))

    def settle(self):
        """What is left once nobody asks: descriptors, running and waiting choices."""
        time.sleep(12)
        text = httpx2.get(self.url.removesuffix("/v1") + "/metrics").text
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {
            "descriptors": self.sample()[1],
            "running": float(found["ar2diff_running"]),
            "waiting": float(found["ar2diff_waiting"]),
        }

    def stop(self):
        self.run.send_signal(signal.SIGTERM)
        return self.run.wait(40)


def ask_on(port, idx, counts, stop):
    draw = random.Random(idx)
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        while not stop.is_set():
            kind = draw.choice(("whole", "whole", "stream", "stream", "leave", "refused"))
            counts[ask(http, port, kind, draw)] += 1


def ask(http, port, kind, draw):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "".join(draw.choices("abcdef ", k=draw.randrange(1, 60)))}],
        "max_tokens": draw.randrange(1, 60),
        "n": draw.choice((1, 1, 1, 2)),
        "diffusion": {"mode": draw.choice(("diffusion", "verified", "ar"))},
    }
    if kind == "leave":
        return leave(port, body | {"stream": draw.random() < 0.5})
    if kind == "refused":
        body["temperature"] = draw.choice((-1, "x", 3))
    got = http.post("/v1/chat/completions", json=body | {"stream": kind == "stream"})
    if got.status_code == 200 and kind == "stream":
        return "streamed" if got.text.endswith("data: [DONE]\n\n") else "stream cut"
    return f"status {got.status_code}"


def leave(port, body):
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        time.sleep(0.005)
    return "left"


def describe(minutes, samples, counts, at_rest, end, code):
    after = [sample for sample in samples if sample[0] > 60 * minutes * WARM_UP_SHARE]
    seconds, resident = np.array([s[0] for s in after]), np.array([s[1] for s in after])
    slope = float(np.polyfit(seconds, resident, 1)[0]) * 600 / float(resident.mean())
    faults = sum(count for name, count in counts.items() if name in ("stream cut", "status 500"))
    leaked = end["running"] + end["waiting"] + max(0, end["descriptors"] - at_rest[1])
    bars = [
        ("memory_slope_share_per_10_min", slope, MAX_SLOPE),
        ("slots_and_descriptors_leaked", leaked, 0),
        ("server_errors_and_cut_streams", faults, 0),
    ]
    return {
        "benchmark": "soak",
        "bars": [
            {"name": name, "value": value, "bar": bar, "better": "lower", "holds": value <= bar}
            for name, value, bar in bars
        ],
        "minutes": minutes,
        "requests": dict(counts),
        "exit_code": code,
        "at_end": end,
        "descriptors_at_rest": at_rest[1],
        "resident_mib": [round(s[1] / 2**20, 2) for s in samples[:: max(1, len(samples) // 60)]],
        "warm_up_share_left_out": WARM_UP_SHARE,
        "hardware": {"machine": platform.machine(), "num_cpus": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "ar2diff": __version__},
    }


if __name__ == "__main__":
    main()
