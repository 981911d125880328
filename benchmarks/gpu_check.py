"""A device check of decoding: the same answers as the CPU, then rates of prefill, AR and denoising on a wide model.

Weights are random, so nothing is downloaded. The wide model has the shapes of a 2B llama in bfloat16; `--quick` takes
a tiny one, and `--device cpu` runs the same code without recorded passes. The last line of standard output is one
JSON document.

    python benchmarks/gpu_check.py --device cpu --quick
"""

import argparse
import copy
import dataclasses
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from ar2diff import __version__
from ar2diff.attention.ops import causal_attend
from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.graphs import GraphRunner
from ar2diff.engine.request import Request
from ar2diff.engine.runner import Runner
from ar2diff.models.loading import LoadedModel
from ar2diff.testing.models import MASK_ID, tiny_diffusion, tiny_model

Reply = dict[str, Any]
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 4, "num_heads": 4, "head_dim": 16}
WIDE = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
    "max_seq_len": 4096,
}
BLOCK = 16
BATCHES = (1, 8, 32)


def build_model(shape: dict[str, int], *, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A random model that talks in bytes, made where it runs."""
    config = {"max_seq_len": 2048, "num_kv_heads": 2, **shape}
    diffusion = tiny_diffusion(block_size=BLOCK, trained_block_sizes=(BLOCK,))
    with torch.device(device):
        loaded = tiny_model(0, diffusion=diffusion, num_layers=1)
    with torch.device("meta"):
        decoder = type(loaded.decoder)(dataclasses.replace(loaded.config, **config))
    decoder = decoder.to(dtype).to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    half = torch.arange(0, decoder.config.head_dim, 2, dtype=torch.float32, device=device)
    decoder.inverse_frequencies = 1.0 / decoder.config.rope_theta ** (half / decoder.config.head_dim)
    return dataclasses.replace(loaded, decoder=decoder, config=decoder.config)


def check_parity(device: torch.device) -> Reply:
    """Largest difference of logits from the CPU's in fp32, and whether engines answer alike."""
    here = build_model(TINY, device=torch.device("cpu"), dtype=torch.float32)
    there = dataclasses.replace(here, decoder=copy.deepcopy(here.decoder).to(device))
    ids = torch.arange(100)[None] % 256
    logits = []
    for loaded, where in ((here, "cpu"), (there, device)):
        attend = causal_attend(loaded.config.softmax_scale)
        hidden = loaded.decoder(ids.to(where), ids.to(where), attend)
        logits.append(loaded.decoder.logits(hidden).float().cpu())
    found: Reply = {"logits": float((logits[0] - logits[1]).abs().max())}
    for mode in ("ar", "verified", "diffusion"):
        requests = [Request(prompt_ids=tuple(range(40, 40 + n)), max_tokens=40, mode=mode) for n in (5, 33, 90)]
        answers = [
            [answer.token_ids for answer in open_engine(x, True).generate_many(requests)] for x in (here, there)
        ]
        found[mode] = sum(a == b for a, b in zip(*answers, strict=True)) / len(requests)
    return found


def open_engine(loaded: LoadedModel, is_fixed: bool) -> Engine:
    """An engine, with recorded passes or without."""
    engine = Engine(loaded, clock=SystemClock(), config=EngineConfig(max_running=max(BATCHES)))
    engine.runner = (GraphRunner if is_fixed else Runner)(loaded.decoder)
    engine.passes._runner = engine.runner
    return engine


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """How long some work takes, the device's queue included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


def measure_rates(engine: Engine, device: torch.device, *, prompt_len: int, max_tokens: int) -> Reply:
    """Prompt tokens a second, and answer tokens a second by mode and batch."""
    vocabulary = 250
    found: Reply = {}

    def prompts(count: int, key: int) -> list[tuple[int, ...]]:
        return [
            tuple((key * 7919 + idx * 31 + p * p) % vocabulary for p in range(prompt_len)) for idx in range(count)
        ]

    single = Request(prompt_ids=prompts(1, 1)[0], max_tokens=1, mode="ar")
    engine.generate(Request(prompt_ids=prompts(1, 2)[0], max_tokens=1, mode="ar"))
    found["prefill"] = round(prompt_len / seconds_of(lambda: engine.generate(single), device), 1)
    modes: dict[str, Reply] = {"ar": {"mode": "ar"}, "denoise": {"policy": "top_k", "denoising_steps": BLOCK // 4}}
    for name, mode in modes.items():
        for count in BATCHES:
            requests = [
                Request(prompt_ids=p, max_tokens=max_tokens, **mode, logit_bias={257: -100.0})
                for p in prompts(count, 3)
            ]
            engine.generate_many(requests)  # prefixes are known and shapes recorded from here on
            answers: list[Any] = []
            seconds = seconds_of(lambda r=requests, a=answers: a.extend(engine.generate_many(r)), device)
            found[f"{name}, {count}"] = round(sum(len(a.token_ids) for a in answers) / seconds, 1)
    return found


def measure_passes(engine: Engine, device: torch.device, *, num_cached: int) -> Reply:
    """Milliseconds of one pass of one block over a cached prefix, without the host's work around it."""
    session = engine.open_session(Request(prompt_ids=(65,) * num_cached, max_tokens=2 * BLOCK))
    cache = session.cache
    cache.commit(num_cached)
    found = {}
    for rows in (1, BLOCK):
        ids = torch.full((rows,), MASK_ID, device=device)
        positions = torch.arange(num_cached, num_cached + rows, device=device)

        def work(ids: torch.Tensor = ids, positions: torch.Tensor = positions) -> None:
            engine.runner(ids, positions, cache.attend_with(None))

        times = [seconds_of(work, device) for _ in range(6)]
        found[str(rows)] = round(min(times) * 1e3, 3)
    return found


def report(device: torch.device, *, quick: bool) -> Reply:
    """Everything, checked and measured."""
    start_s = time.perf_counter()
    parity = check_parity(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = build_model(TINY if quick else WIDE, device=device, dtype=dtype)
    num_parameters = sum(parameter.numel() for parameter in loaded.decoder.parameters())
    sizes = {"prompt_len": 64, "max_tokens": 16} if quick else {"prompt_len": 1024, "max_tokens": 128}
    rates, passes = {}, {}
    for name, is_fixed in (("recorded", True), ("plain", False)):
        engine = open_engine(loaded, is_fixed)
        passes[name] = measure_passes(engine, device, num_cached=sizes["prompt_len"])
        rates[name] = measure_rates(engine, device, **sizes)
        if is_fixed:
            num_recorded = engine.runner.num_recorded
        del engine
    bars = [
        ("logits, largest difference from the CPU in fp32", parity["logits"], 1e-2, "lower"),
        *((f"{mode} answers are the CPU's", parity[mode], 1.0, "higher") for mode in ("ar", "verified", "diffusion")),
    ]
    if device.type == "cuda":
        for count in BATCHES[:2]:
            ratio = rates["recorded"][f"ar, {count}"] / rates["plain"][f"ar, {count}"]
            bars.append((f"recorded over plain passes, ar, batch {count}", ratio, 1.5, "higher"))
        ratio = rates["recorded"]["denoise, 1"] / rates["recorded"]["ar, 1"]
        bars.append((f"denoising {BLOCK // 4} passes a block over ar, batch 1", ratio, 2.0, "higher"))
    is_gpu = device.type == "cuda"
    return {
        "benchmark": "gpu_check",
        "bars": [
            {"name": n, "value": round(v, 5), "bar": b, "better": w, "holds": v >= b if w == "higher" else v <= b}
            for n, v, b, w in bars
        ],
        "tokens_per_s": rates,
        "pass_milliseconds": passes,
        "num_recorded": num_recorded,
        "num_parameters": num_parameters,
        "parity": parity,
        "dtype": str(dtype).removeprefix("torch."),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if is_gpu else None,
        "hardware": {"device": torch.cuda.get_device_name(device) if is_gpu else platform.machine()},
        "versions": {"ar2diff": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(time.perf_counter() - start_s, 1),
        "quick": quick,
    }


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="a tiny model: under a minute")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: use --device cpu --quick for the same code on the CPU")
    # Sums in fp32 that are compared with the CPU's must not be rounded to TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        print(json.dumps(report(torch.device(options.device), quick=options.quick)))


if __name__ == "__main__":
    main()
