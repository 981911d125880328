"""One optimizer step's speed, memory and model-FLOPs use, against the plain layout that block-diffusion trainers use.

Ours: packed documents, prompts without noisy copies, two complementary views over one clean stream, tiled attention,
logits in chunks where a loss needs them. Plain: one document per padded row, [noisy | clean] of 2L positions under a
dense mask, one view, logits everywhere. Same model, documents, precision and threads; each side runs in a process of
its own. "ours_lean" computes each layer again in the backward pass: both bars against the plain layout are its. The
gated adapter (rank 16) is measured against full training, both with the diffusion loss alone, on the same rows.

Peak memory is what a step adds to the loaded libraries. Model-FLOPs use is the FLOPs that the model's formula needs
(recomputation not counted), as a share of what one large matrix product reaches on the same machine and threads.
--quick shrinks layers and vocabulary by the same factor, so that the output layer's share of the work stays that of
the full model; with CUDA everything is in bf16 products. The last line of standard output is one JSON document.

    python benchmarks/train_step.py --quick
"""

import argparse
import dataclasses
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
from ar2diff.train.recompute import Recompute, set_recompute
from ar2diff.train.step import accumulate_gradients

BLOCK_SIZE, MASK_ID, END_ID = 8, 0, 2


def build_decoder(num_layers: int) -> Decoder:
    """A randomly initialised decoder with the shapes of a 135M llama, its vocabulary cut as its layers are."""
    torch.manual_seed(0)
    config = DecoderConfig(
        model_type="llama",
        vocab_size=vocab_size(num_layers),
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


def vocab_size(num_layers: int) -> int:
    """That of the full model at its 30 layers; a multiple of 64."""
    return 49152 * num_layers // 30 // 64 * 64


def draw_row(num_documents: int, num_ids: int, seed: int) -> PackedRow:
    """Documents of mixed lengths (100 to 260 tokens, a third of them prompt), as short chat answers have."""
    generator = np.random.default_rng(seed)
    lens = generator.integers(100, 261, num_documents)
    prompt_lens = (lens * generator.uniform(0.2, 0.5, num_documents)).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(lens)[:-1]))
    return PackedRow(
        row_id=seed,
        token_ids=generator.integers(3, num_ids, int(lens.sum())),
        document_starts=starts,
        document_lens=lens,
        prompt_lens=prompt_lens,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one step computed: positions, clean ones among them, tokens that carry each loss, the model's FLOPs."""

    positions: int
    clean: int
    diffusion: int
    causal: int
    model_flops: float


class OurStep:
    """The product's own step."""

    def __init__(
        self,
        decoder: Decoder,
        precision: str,
        *,
        ar_weight: float = 0.5,
        distill: bool = False,
        recompute: Recompute = "mlp",
    ) -> None:
        self.decoder, self.precision, self.ar_weight = decoder, precision, ar_weight
        self.distillation = self._build_distillation() if distill else None
        set_recompute(decoder, recompute)
        self.named = trained_parameters(decoder, MaskRow(decoder, MASK_ID))
        self.optimizer = build_optimizer(self.named, OptimConfig())

    def run(self, row: PackedRow) -> Counts:
        """One step."""
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
        num_clean = int((batch.layout.places.stream_idx == 0).sum())
        return Counts(
            positions=len(batch.token_ids_L),
            clean=num_clean,
            diffusion=batch.num_diffusion,
            causal=batch.num_causal,
            model_flops=self._count_flops(len(batch.token_ids_L), num_clean, len(batch.logit_idx_P)),
        )

    def _count_flops(self, positions: int, num_clean: int, num_logits: int) -> float:
        # Two a weight and position forward, two for the input's gradient, two for the weight's. Attention's own
        # products are left out: a few per cent at these lengths.
        layers = sum(p.numel() for p in self.decoder.layers.parameters())
        head = 4.0 * self.decoder.head_weight.numel() * num_logits
        if self.decoder.adapter is None:
            return 6.0 * layers * positions + head
        return 2.0 * layers * num_clean + 4.0 * layers * (positions - num_clean) + head

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

    def run(self, row: PackedRow) -> Counts:
        """One step."""
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
        device = self.decoder.embedding.weight.device
        positions_BL = torch.arange(length).repeat(2)[None].expand(count, -1).to(device)
        ids_BL, both_BL, masked_BL, supervised_BL, level_B1, mask = (
            tensor.to(device) for tensor in (ids_BL, both_BL, masked_BL, supervised_BL, level_B1, self._mask(length))
        )

        def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            del layer_idx
            q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.decoder.logits(self.decoder(both_BL, positions_BL, attend)[:, :length])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids_BL.flatten(), reduction="none").view(count, length)
        ((loss * masked_BL / level_B1).sum() / supervised_BL.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        layers = sum(p.numel() for p in self.decoder.layers.parameters())
        flops = 6.0 * layers * both_BL.numel() + 6.0 * self.decoder.head_weight.numel() * count * length
        num_masked = int(masked_BL.sum())
        return Counts(
            positions=both_BL.numel(), clean=both_BL.numel() // 2, diffusion=num_masked, causal=0, model_flops=flops
        )

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
    "ours_lean": lambda decoder, precision: OurStep(decoder, precision, recompute="layer"),
    "full": lambda decoder, precision: OurStep(decoder, precision, ar_weight=0.0),
    "adapter": lambda decoder, precision: OurStep(adapted(decoder), precision, ar_weight=0.0),
    "full_distilled": lambda decoder, precision: OurStep(decoder, precision, ar_weight=0.0, distill=True),
    "adapter_distilled": lambda decoder, precision: OurStep(adapted(decoder), precision, ar_weight=0.0, distill=True),
}


def measure(side: str, num_layers: int, num_documents: int, steps: int, device: str) -> dict[str, float]:
    """Best of `steps` steps after one warm-up, and the peak memory that they add."""
    precision = "bf16" if device == "cuda" else "fp32"
    reach = matrix_flops(device, precision)
    libraries_mb = peak_memory_mb(device)
    stepper = SIDES[side](build_decoder(num_layers).to(device), precision)
    row = draw_row(num_documents, vocab_size(num_layers), seed=0)
    times, cpu_times = [], []
    for _ in range(steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        counts = stepper.run(row)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        cpu_times.append(time.process_time() - cpu_started)
    best = min(times[1:])
    return {
        "step_s": best,
        "cpu_s": min(cpu_times[1:]),
        "positions_per_s": counts.positions / best,
        "document_tokens_per_s": int(row.document_lens.sum()) / best,
        "diffusion_losses_per_s": counts.diffusion / best,
        "all_losses_per_s": (counts.diffusion + counts.causal) / best,
        "model_flops_use": counts.model_flops / best / reach,
        "peak_mb": peak_memory_mb(device) - libraries_mb,
    }


def peak_memory_mb(device: str) -> float:
    """The most memory that the device, or the process on the CPU, has held so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def matrix_flops(device: str, precision: str) -> float:
    """FLOPs a second of one large matrix product."""
    size = 8192 if device == "cuda" else 1024
    left = torch.ones(size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        left @ left
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def measure_in_process(side: str, options: argparse.Namespace) -> dict[str, float]:
    """`measure` in a fresh interpreter."""
    layers, documents, steps = (2, 4, 2) if options.quick else (30, 4, 2)
    command = [sys.executable, __file__, "--side", side, "--device", options.device]
    command += ["--sizes", f"{layers},{documents},{steps}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return json.loads(done.stdout.splitlines()[-1])


RATIOS = (
    ("diffusion losses per second over the plain layout", "diffusion_losses_per_s", 2.0, "ours_lean", "plain"),
    ("peak memory over the plain layout", "peak_mb", 0.5, "ours_lean", "plain"),
    ("positions per second, adapter over full training", "positions_per_s", 1.6, "adapter", "full"),
    ("peak memory, adapter over full training", "peak_mb", 1.0, "adapter", "full"),
    (
        "positions per second, both distilled",
        "positions_per_s",
        1.6,
        "adapter_distilled",
        "full_distilled",
    ),
)


def report(options: argparse.Namespace) -> dict[str, object]:
    """All measurements and the bars."""
    found = {side: measure_in_process(side, options) for side in SIDES}
    bars = []
    for name, key, bar, first, second in RATIOS:
        value = found[first][key] / found[second][key]
        better = "lower" if key == "peak_mb" else "higher"
        holds = value <= bar if better == "lower" else value >= bar
        bars.append({"name": name, "value": round(value, 3), "bar": bar, "better": better, "holds": holds})
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    return {
        "benchmark": "train_step",
        "bars": bars,
        "sides": found,
        "hardware": {"device": device, "cpus": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"ar2diff": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "quick": options.quick,
    }


def main() -> None:
    """Parse the line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 layers instead of 30: under a minute")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        layers, documents, steps = map(int, options.sizes.split(","))
        print(json.dumps(measure(options.side, layers, documents, steps, options.device)))
        return
    print(json.dumps(report(options)))


if __name__ == "__main__":
    main()
