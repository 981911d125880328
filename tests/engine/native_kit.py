"""Small decoders, caches and one compiled library for all tests of the native runner."""

import ctypes
from pathlib import Path

import torch

from ar2diff.attention.kv_cache import KVCache
from ar2diff.engine.native.build import build_library
from ar2diff.engine.native.library import Matrix, load_library
from ar2diff.engine.native.pack import Arena
from ar2diff.engine.native.runner import NativeRunner
from ar2diff.models.config import DecoderConfig
from ar2diff.models.decoder import Decoder

BASE = {
    "model_type": "tiny",
    "vocab_size": 75,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_seq_len": 256,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def build_decoder(seed=0, **overrides):
    torch.manual_seed(seed)
    decoder = Decoder(DecoderConfig(**{**BASE, **overrides}))
    for name, parameter in decoder.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        if "norm" in name:
            parameter.data += 1 - decoder.config.norm_offset
    return decoder.requires_grad_(False)


def build_cache(config, capacity=128):
    return KVCache(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        softmax_scale=config.softmax_scale,
        capacity=capacity,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def build_runner(decoder, folder, *, num_threads=1, portable=False):
    runner = NativeRunner(decoder, cache_dir=folder, num_threads=num_threads, portable=portable)
    runner.reserve(256)
    return runner


def causal_mask(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def run_chunks(runner, ids, sizes, *, mask=causal_mask):
    """Hidden states of `ids`, taken in by chunks of some sizes, each committed."""
    cache, done, parts = build_cache(runner.config), 0, []
    for size in sizes:
        positions = torch.arange(done, done + size)
        parts.append(runner(ids[done : done + size], positions, cache.attend_with(mask(size))))
        cache.commit(size)
        done += size
    return torch.cat(parts)


def multiply(folder, weight, x, *, portable=False):
    """x @ weight.T by the compiled product."""
    library = load_library(build_library(Path(folder), portable=portable))
    arena = Arena()
    matrix = arena.add(weight, None)
    arena.close()
    assert isinstance(matrix, Matrix)
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).contiguous()
    out = torch.full((len(x), len(weight)), torch.nan)
    status = library.ar2_multiply(ctypes.byref(matrix), padded.data_ptr(), len(x), out.data_ptr(), len(weight))
    assert status == 0
    return out
