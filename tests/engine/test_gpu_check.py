"""The script that checks a GPU runs on the CPU too: what is written without a device is at least run without one."""

import importlib.util
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def test_the_device_check_runs_whole_on_the_cpu(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "BATCHES", (1, 2))
    with torch.inference_mode():
        document = script.report(torch.device("cpu"), quick=True)
    assert [bar["name"] for bar in document["bars"] if not bar["holds"]] == []
    assert set(document["tokens_per_s"]["recorded"]) == {"prefill", "ar, 1", "ar, 2", "denoise, 1", "denoise, 2"}
    assert document["num_recorded"] > 2
