"""One optimizer step's speed and memory on the CPU, against the plain layout that block-diffusion trainers use.

Ours: packed documents, prompts without noisy copies, two complementary views over one clean stream, tiled attention,
logits in chunks where a loss needs them. Plain: one document per padded row, [noisy | clean] of 2L positions under a
dense mask, one view, logits everywhere. Same model, documents, precision and threads; each side runs in a process of
its own, so that peak memory is its own. The gated adapter (rank 16) is measured against full training, both with the
diffusion loss alone, on the same rows. The last line of standard output is one JSON document.

    python benchmarks/train_step.py --quick
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ar2diff import __version__
from ar2diff.attention.layout import DocumentShape, build_layout
from ar2diff.attention.masks import build_visible_mask
from ar2diff.data.stream import PackedRow
from ar2diff.diffusion.noise import NoiseConfig
from ar2diff.models.adapters import AdapterConfig, GatedAdapter
from ar2diff.models.config import DecoderConfig
from ar2diff.models.decoder import Decoder
from ar2diff.train.batch import BatchSettings, build_batch, keyed_noise
from ar2diff.train.distill import Distillation, copy_parent
from ar2diff.train.mask_row import MaskRow
from ar2diff.train.optim import OptimConfig, build_optimizer, trained_parameters
from ar2diff.train.step import accumulate_gradients

BLOCK_SIZE, MASK_ID, END_ID = 8, 0, 2


def build_decoder(num_layers: int) -> Decoder:
    """A randomly initialised decoder with the shapes of a 135M llama."""
    torch.manual_seed(0)
    config = DecoderConfig(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=num_layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_seq_len=8192,
        norm_eps=1e-5,
        rope_theta=100000.0,
        tied_head=True,
    )
    decoder = Decoder(config)
    decoder.embedding.weight.data.mul_(0.05)
    return decoder


def draw_row(num_documents: int, seed: int) -> PackedRow:
    """Documents of mixed lengths (100 to 260 tokens, a third of them prompt), as short chat answers have."""
    generator = np.random.default_rng(seed)
    lens = generator.integers(100, 261, num_documents)
    prompt_lens = (lens * generator.uniform(0.2, 0.5, num_documents)).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(lens)[:-1]))
    return PackedRow(
        row_id=seed,
        token_ids=generator.integers(3, 49152, int(lens.sum())),
        document_starts=starts,
        document_lens=lens,
        prompt_lens=prompt_lens,
    )


class OurStep:
    """The product's own step."""

    def __init__(self, decoder: Decoder, precision: str, *, ar_weight: float = 0.5, distill: bool = False) -> None:
        self.decoder, self.precision, self.ar_weight = decoder, precision, ar_weight
        self.distillation = self._build_distillation() if distill else None
        self.named = trained_parameters(decoder, MaskRow(decoder, MASK_ID))
        self.optimizer = build_optimizer(self.named, OptimConfig())

    def run(self, row: PackedRow) -> tuple[int, int, int]:
        """One step; returns positions computed, diffusion losses, next-token losses."""
        settings = BatchSettings(
            block_size=BLOCK_SIZE,
            shift_logits=True,
            clean_attention="causal",
            mask_token_id=MASK_ID,
            end_token_id=END_ID,
            nelbo_weighted=False,
            with_causal=self.ar_weight > 0,
        )
        batch = build_batch([row], settings, keyed_noise(NoiseConfig(), shift_logits=True, seed=0, step=0))
        accumulate_gradients(
            self.decoder,
            [batch],
            ar_weight=self.ar_weight,
            mask_token_id=MASK_ID,
            precision=self.precision,
            distillation=self.distillation,
        )
        torch.nn.utils.clip_grad_norm_(self.named.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return len(batch.token_ids_L), batch.num_diffusion, batch.num_causal

    def _build_distillation(self) -> Distillation:
        is_frozen = self.decoder.adapter is not None
        parent = None if is_frozen else copy_parent(self.decoder, share_embeddings=True)
        return Distillation(weight=1.0, top_k=64, shift_logits=True, parent=parent)


class PlainStep:
    """[noisy | clean] rows, padded to the longest, under one dense mask each."""

    def __init__(self, decoder: Decoder, precision: str) -> None:
        self.decoder, self.precision = decoder, precision
        self.optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=True)
        self.generator = np.random.default_rng(0)

    def run(self, row: PackedRow) -> tuple[int, int, int]:
        """One step; returns positions computed, diffusion losses, next-token losses (none)."""
        count, length = len(row.document_lens), int(row.document_lens.max())
        ids_BL = torch.full((count, length), END_ID)
        supervised_BL = torch.zeros(count, length, dtype=torch.bool)
        for idx, (start, size, prompt_len) in enumerate(
            zip(row.document_starts, row.document_lens, row.prompt_lens, strict=True)
        ):
            ids_BL[idx, :size] = torch.from_numpy(row.token_ids[start : start + size])
            supervised_BL[idx, prompt_len:size] = True
        # Evenly spread levels: the mean over many steps in one.
        level_B1 = torch.from_numpy((self.generator.permutation(count)[:, None] + 0.5) / count)
        masked_BL = supervised_BL & (torch.from_numpy(self.generator.random((count, length))) < level_B1)
        both_BL = torch.cat((ids_BL.masked_fill(masked_BL, MASK_ID), ids_BL), dim=1)
        positions_BL = torch.arange(length).repeat(2)[None].expand(count, -1)
        mask = self._mask(length)

        def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            del layer_idx
            q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.decoder.logits(self.decoder(both_BL, positions_BL, attend)[:, :length])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids_BL.flatten(), reduction="none").view(count, length)
        ((loss * masked_BL / level_B1).sum() / supervised_BL.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return both_BL.numel(), int(masked_BL.sum()), 0

    def _mask(self, length: int) -> Tensor:
        # Every document as one response from its first token on, as layouts without packing have it.
        num_blocks = -(-length // BLOCK_SIZE)
        shape = DocumentShape(num_tokens=length, prompt_len=0, block_views=np.ones((num_blocks, 1), dtype=bool))
        places = build_layout([shape], block_size=BLOCK_SIZE, clean_attention="block").places
        order = torch.cat((torch.arange(length, 2 * length), torch.arange(length)))
        return build_visible_mask(places.select(order), places.select(order), clean_attention="block")


def adapted(decoder: Decoder) -> Decoder:
    """The decoder with a fresh adapter."""
    GatedAdapter(decoder, AdapterConfig(rank=16), mask_token_id=MASK_ID, seed=0)
    return decoder


SIDES = {
    "ours": OurStep,
    "plain": PlainStep,
    "full": lambda decoder, precision: OurStep(decoder, precision, ar_weight=0.0),
    "adapter": lambda decoder, precision: OurStep(adapted(decoder), precision, ar_weight=0.0),
    "full_distilled": lambda decoder, precision: OurStep(decoder, precision, ar_weight=0.0, distill=True),
    "adapter_distilled": lambda decoder, precision: OurStep(adapted(decoder), precision, ar_weight=0.0, distill=True),
}


def measure(side: str, num_layers: int, num_documents: int, steps: int, precision: str) -> dict[str, float]:
    """Best of `steps` steps after one warm-up; tokens/s and peak resident memory."""
    decoder = build_decoder(num_layers)
    stepper = SIDES[side](decoder, precision)
    row = draw_row(num_documents, seed=0)
    best = None
    for number in range(steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        counts = stepper.run(row)
        took = time.perf_counter() - started
        cpu_s = time.process_time() - cpu_started
        if number and (best is None or took < best):
            best = took
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    computed, diffusion, causal = counts
    return {
        "step_s": best,
        "cpu_s": cpu_s,
        "positions_per_s": computed / best,
        "document_tokens_per_s": int(row.document_lens.sum()) / best,
        "diffusion_losses_per_s": diffusion / best,
        "all_losses_per_s": (diffusion + causal) / best,
        "peak_mb": peak_mb,
    }


def measure_in_process(side: str, options: argparse.Namespace, precision: str) -> dict[str, float]:
    """`measure` in a fresh interpreter."""
    layers, documents, steps = (4, 4, 1) if options.quick else (30, 16, 3)
    command = [sys.executable, __file__, "--side", side, "--precision", precision]
    command += ["--sizes", f"{layers},{documents},{steps}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return json.loads(done.stdout.splitlines()[-1])


def report(options: argparse.Namespace) -> dict[str, object]:
    """All measurements and the bars."""
    ours, plain, narrow, full, adapter, full_distilled, adapter_distilled = (
        measure_in_process(side, options, precision)
        for side, precision in (
            ("ours", "fp32"),
            ("plain", "fp32"),
            ("ours", "bf16"),
            ("full", "fp32"),
            ("adapter", "fp32"),
            ("full_distilled", "fp32"),
            ("adapter_distilled", "fp32"),
        )
    )
    ratios = (
        ("diffusion losses per second over the plain layout", "diffusion_losses_per_s", 2.0, "higher", ours, plain),
        ("peak memory over the plain layout", "peak_mb", 1.0, "lower", ours, plain),
        ("fp32 over bf16 products, positions per second", "positions_per_s", 1.0, "higher", ours, narrow),
        ("adapter over full training, positions per second", "positions_per_s", 1.6, "higher", adapter, full),
        ("peak memory of the adapter over full training", "peak_mb", 1.0, "lower", adapter, full),
        ("distilled, adapter over full", "positions_per_s", 1.6, "higher", adapter_distilled, full_distilled),
    )
    bars = []
    for name, key, bar, better, first, second in ratios:
        value = first[key] / second[key]
        holds = value >= bar if better == "higher" else value <= bar
        bars.append({"name": name, "value": round(value, 3), "bar": bar, "better": better, "holds": holds})
    return {
        "benchmark": "train_step",
        "bars": bars,
        "ours_fp32": ours,
        "plain_fp32": plain,
        "ours_bf16": narrow,
        "full_fp32": full,
        "adapter_fp32": adapter,
        "full_distilled_fp32": full_distilled,
        "adapter_distilled_fp32": adapter_distilled,
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"ar2diff": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "quick": options.quick,
    }


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 layers instead of 30: half a minute")
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        layers, documents, steps = map(int, options.sizes.split(","))
        print(json.dumps(measure(options.side, layers, documents, steps, options.precision)))
        return
    print(json.dumps(report(options)))


if __name__ == "__main__":
    main()
