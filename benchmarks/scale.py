"""The memory arithmetic of docs/scale.md, computed from the decoder's own shapes; fails where the page differs.

    python benchmarks/scale.py docs/scale.md

Prints the page's table. With a page it exits with 1 where a line of the table is not on it.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ar2diff.models.config import DecoderConfig
from ar2diff.models.decoder import Decoder

GPUS = (1, 8, 64)
NUM_STREAMS, ROW_LEN, RANK, CHUNK = 3, 4096, 16, 256
# A rank that saves holds three copies of one part file: at most this much, or the embedding alone.
PART_BYTES = 10**9
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A published Qwen3 shape."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    tied: bool
    vocab: int = 151936
    kv_heads: int = 8
    head_dim: int = 128


SHAPES = (
    Shape(name="Qwen3-1.7B", hidden=2048, inner=6144, layers=28, heads=16, tied=True),
    Shape(name="Qwen3-8B", hidden=4096, inner=12288, layers=36, heads=32, tied=False),
    Shape(name="Qwen3-32B", hidden=5120, inner=25600, layers=64, heads=64, tied=False),
)


def build(shape: Shape) -> Decoder:
    """The decoder without memory."""
    config = DecoderConfig(
        model_type="qwen3",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_seq_len=32768,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied_head=shape.tied,
        qk_norm="head",
    )
    with torch.device("meta"):
        return Decoder(config)


def activations(shape: Shape) -> float:
    """Bytes that one micro-batch of one row keeps: each layer's input, and all of one layer while it runs again."""
    positions = ROW_LEN * NUM_STREAMS
    kept = 4 * positions * shape.hidden * shape.layers
    wide = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 4 * shape.hidden + 4 * shape.inner
    return kept + 4 * positions * wide + 2 * 4 * CHUNK * shape.vocab


def rows(shape: Shape) -> list[str]:
    """The table's lines of one model: full training on each number of GPUs, the adapter, the host."""
    decoder = build(shape)
    in_layers = sum(p.numel() for p in decoder.layers.parameters())
    total = sum(p.numel() for p in decoder.parameters())
    one_layer = in_layers / shape.layers
    whole = 4 * (total - in_layers)
    moving = activations(shape)
    full = []
    for gpus in GPUS:
        # Weight, gradient and two moments of 4 bytes; two gathered layers and one layer's gradient where sharded.
        gathered = 0 if gpus == 1 else 3 * 4 * one_layer
        full.append(16 * in_layers / gpus + gathered + whole + moving)
    per_rank = sum(RANK * sum(layer.weight.shape) for layer in decoder.modules() if _is_adapted(layer))
    adapter = 4 * total + 16 * per_rank + moving
    saving = 3 * max(PART_BYTES, 4 * decoder.embedding.weight.numel())
    numbers = [f"{value / GB:.0f}" for value in (*full, adapter, moving, 4 * total, saving)]
    return [f"| {shape.name} | {total / 1e9:.2f} | " + " | ".join(numbers) + " |"]


def _is_adapted(layer: torch.nn.Module) -> bool:
    return isinstance(layer, torch.nn.Linear) and layer.out_features < 100_000


def main() -> None:
    """Print the table; compare it with a page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", nargs="?", type=Path)
    options = parser.parse_args()
    lines = [line for shape in SHAPES for line in rows(shape)]
    print("\n".join(lines))
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8").splitlines()
        table = [line for line in page if line.startswith("| Qwen3-")]
        if table != lines:
            sys.exit(f"{options.page} has another table:\n" + "\n".join(table))


if __name__ == "__main__":
    main()
