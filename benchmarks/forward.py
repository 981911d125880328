"""Milliseconds of one forward pass on the CPU, by the number of rows: torch in fp32 and bf16, compiled int8.

Random weights with the shapes of a 135M llama, 256 cached tokens, head included for every row. The sides take turns
and the least time of each counts, since a shared machine only ever adds to it. With --model, how far int8 and bf16
are from fp32 on text, and whether verified answers in int8 are the AR answers. The last line of standard output is
one JSON document.

    python benchmarks/forward.py --quick
"""

import argparse
import copy
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ar2diff import __version__
from ar2diff.attention.kv_cache import KVCache
from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.native.runner import NativeRunner
from ar2diff.engine.precision import AnyRunner
from ar2diff.engine.request import Request
from ar2diff.engine.runner import Runner
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import LoadedModel, load_model

ROWS = (1, 4, 8, 16, 32, 64)
NUM_CACHED = 256
MILLISECOND_BARS = {1: 10.0, 8: 14.0, 16: 20.0, 32: 35.0}
PROMPTS = (
    "Explain in four sentences why the sky is blue.",
    "Write a short letter that asks a library to extend a loan.",
    "List the planets of the solar system with one fact about each.",
    "Write a JSON object that describes an order of two books and a lamp.",
    "What is the difference between weather and climate?",
    "Give a recipe for pancakes as numbered steps.",
)
Numbers = dict[str, float]


def build_decoder() -> Decoder:
    """A random decoder with the shapes of a 135M llama."""
    config = DecoderConfig(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_seq_len=2048,
        norm_eps=1e-5,
        rope_theta=100000.0,
        tied_head=True,
    )
    decoder = Decoder(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            parameter.uniform_(-0.05, 0.05, generator=generator)
    return decoder


def build_cache(runner: AnyRunner, num_cached: int) -> KVCache:
    """A cache that holds some tokens."""
    config = runner.config
    cache = KVCache(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        softmax_scale=config.softmax_scale,
        capacity=num_cached + max(ROWS),
        dtype=runner.dtype,
        device=runner.device,
    )
    cache.commit(num_cached)
    return cache


def seconds_of(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def forward(runner: AnyRunner, cache: KVCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of all rows of one causal pass."""
    count = len(ids)
    runner.reserve(cache.length + count)
    positions = torch.arange(cache.length, cache.length + count)
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    return runner.logits(runner(ids, positions, cache.attend_with(mask)))


def measure_speed(runners: dict[str, AnyRunner], repeats: int) -> dict[str, Numbers]:
    """Least milliseconds by side and row count."""
    caches = {name: build_cache(runner, NUM_CACHED) for name, runner in runners.items()}
    least: dict[str, Numbers] = {name: {} for name in runners}
    for _ in range(repeats):
        for count in ROWS:
            ids = torch.arange(count) * 37 % 49152
            for name, runner in runners.items():
                forward_s = seconds_of(lambda r=runner, c=caches[name], i=ids: forward(r, c, i))
                least[name][str(count)] = min(forward_s * 1e3, least[name].get(str(count), 1e9))
    return {name: {count: round(value, 2) for count, value in times.items()} for name, times in least.items()}


def measure_read_rate(repeats: int) -> float:
    """Bytes a second in 1e9 that this machine sums from memory, with torch's threads."""
    block = torch.ones(18 << 20, dtype=torch.int64)
    return block.numel() * 8 / min(seconds_of(block.sum) for _ in range(repeats)) / 1e9


def rows_are_bit_equal(runner: NativeRunner) -> bool:
    """Whether a pass of many rows gives each row what passes of one row give."""
    ids = torch.arange(21) * 37
    wide, cache, narrow = forward(runner, build_cache(runner, 0), ids), build_cache(runner, 0), []
    for idx in range(len(ids)):
        narrow.append(forward(runner, cache, ids[idx : idx + 1]))
        cache.commit(1)
    return torch.equal(wide, torch.cat(narrow))


def measure_quality(path: Path, folder: Path, threads: int, max_tokens: int) -> Numbers:
    """Divergence from fp32 on fp32's own answers, and equality of verified and AR answers in int8."""
    loaded = load_model(path)
    # Any id serves as the mask here: an unconverted model drafts badly, and verification must not care.
    diffusion = loaded.diffusion or DiffusionConfig(
        block_size=8, trained_block_sizes=(8,), shift_logits=True, mask_token_id=4, clean_attention="causal"
    )
    engines = {
        "fp32": Engine(loaded, clock=SystemClock()),
        "int8": Engine(
            _with_diffusion(loaded, diffusion),
            clock=SystemClock(),
            config=EngineConfig(precision="int8", library_dir=folder, num_threads=threads),
        ),
    }
    texts, numbers = [], {"verified_is_ar": 0.0, "answers_equal_fp32": 0.0}
    for text in PROMPTS:
        ids = loaded.tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)
        request = {"prompt_ids": tuple(ids), "max_tokens": max_tokens}
        answers = {
            "fp32": engines["fp32"].generate(Request(**request, mode="ar")).token_ids,
            "int8": engines["int8"].generate(Request(**request, mode="ar")).token_ids,
            "verified": engines["int8"].generate(Request(**request, mode="verified", draft_len=7)).token_ids,
        }
        numbers["verified_is_ar"] += (answers["verified"] == answers["int8"]) / len(PROMPTS)
        numbers["answers_equal_fp32"] += (answers["int8"] == answers["fp32"]) / len(PROMPTS)
        texts.append([*ids, *answers["fp32"]])
    narrow = Runner(copy.deepcopy(loaded.decoder).to(torch.bfloat16))
    for name, runner in (("int8", engines["int8"].runner), ("bf16", narrow)):
        numbers |= compare_logits(name, engines["fp32"].runner, runner, texts)
    return {name: round(value, 5) for name, value in numbers.items()}


def _with_diffusion(loaded: LoadedModel, diffusion: DiffusionConfig) -> LoadedModel:
    return LoadedModel(
        decoder=loaded.decoder,
        config=loaded.config,
        tokenizer=loaded.tokenizer,
        diffusion=diffusion,
        tensor_root=loaded.tensor_root,
        hf_config=loaded.hf_config,
    )


def compare_logits(name: str, wide: AnyRunner, narrow: AnyRunner, texts: list[list[int]]) -> Numbers:
    """Mean divergence of `narrow` from `wide` in nats a token, and the share of equal most likely tokens."""
    divergences, equal = [], []
    for ids in texts:
        wanted, got = (
            forward(runner, build_cache(runner, 0), torch.tensor(ids[: max(ROWS)])).float().log_softmax(dim=-1)
            for runner in (wide, narrow)
        )
        divergences.append((wanted.exp() * (wanted - got)).sum(dim=-1))
        equal.append(wanted.argmax(dim=-1) == got.argmax(dim=-1))
    return {
        f"{name}_divergence": float(torch.cat(divergences).mean()),
        f"{name}_equal_choice": float(torch.cat(equal).float().mean()),
    }


def list_bars(times: dict[str, Numbers], is_equal: bool, quality: Numbers | None) -> list[dict[str, object]]:
    """What is asked of these numbers, and whether it holds."""
    rows: list[tuple[str, float, float, str]] = [
        (f"int8, {count} rows, ms", times["int8"][str(count)], bar, "lower")
        for count, bar in MILLISECOND_BARS.items()
    ]
    rows += [
        (f"bf16 over int8, {count} rows", times["bf16"][str(count)] / times["int8"][str(count)], 2.0, "higher")
        for count in (1, 8)
    ]
    rows.append(("rows are bit-equal at any row count", float(is_equal), 1.0, "higher"))
    if quality:
        rows.append(("verified answers are the AR answers", quality["verified_is_ar"], 1.0, "higher"))
        rows.append(("int8 divergence from fp32, nats a token", quality["int8_divergence"], 0.01, "lower"))
    return [
        {
            "name": name,
            "value": round(value, 4),
            "bar": bar,
            "better": better,
            "holds": value >= bar if better == "higher" else value <= bar,
        }
        for name, value, bar, better in rows
    ]


def report(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Everything, measured."""
    torch.set_num_threads(options.threads)
    decoder = build_decoder()
    native = NativeRunner(decoder, cache_dir=folder, num_threads=options.threads)
    runners: dict[str, AnyRunner] = {
        "fp32": Runner(decoder),
        "bf16": Runner(copy.deepcopy(decoder).to(torch.bfloat16)),
        "int8": native,
    }
    times = measure_speed(runners, 2 if options.quick else 12)
    is_equal = rows_are_bit_equal(native)
    quality = (
        measure_quality(options.model, folder, options.threads, 16 if options.quick else 96)
        if options.model
        else None
    )
    one_row_s = times["int8"]["1"] / 1e3
    multiplied = sum(p.numel() for p in decoder.parameters() if p.ndim == 2)
    return {
        "benchmark": "forward",
        "bars": list_bars(times, is_equal, quality),
        "milliseconds": times,
        "int8_weight_bytes": native.weight_bytes,
        "int8_read_rate": round(native.weight_bytes / one_row_s / 1e9, 2),
        "memory_read_rate": round(measure_read_rate(10), 2),
        "int8_gflops_at_64_rows": round(2 * multiplied * 64 / times["int8"]["64"] / 1e6, 1),
        "quality": quality,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": options.threads},
        "load_average": round(os.getloadavg()[0], 2),
        "versions": {"ar2diff": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "quick": options.quick,
    }


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repeats: under a minute")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="for all sides")
    parser.add_argument("--model", type=Path, help="folder of a model or a .gguf file, for the quality figures")
    parser.add_argument(
        "--library-dir", type=Path, help="where compiled code is kept; a temporary folder unless given"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        print(json.dumps(report(options, options.library_dir or Path(temporary))))


if __name__ == "__main__":
    main()
