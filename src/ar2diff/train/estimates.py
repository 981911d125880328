"""What a training will need, before it starts: memory from sizes, speed from a short trial or from arithmetic.

Shape letters: L sequence, E model dim.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ar2diff.clock import Clock
from ar2diff.data.stream import PackedRow
from ar2diff.models.adapters import AdapterConfig, GatedAdapter
from ar2diff.models.config import DecoderConfig
from ar2diff.models.decoder import Decoder
from ar2diff.train.batch import BatchSettings, TrainingBatch, build_batch, keyed_noise
from ar2diff.train.config import TrainConfig
from ar2diff.train.mask_row import MaskRow
from ar2diff.train.optim import trained_parameters
from ar2diff.train.step import accumulate_gradients

FP32_BYTES = 4
# AdamW keeps two moments beside each trained weight and its gradient.
OPTIMIZER_COPIES = 3
# A trial's arithmetic stays below this, so that it ends within seconds on a small machine.
TRIAL_FLOPS = 5e11
TRIAL_PARAMETERS = 300_000_000
TRIAL_MIN_LEN, TRIAL_MAX_LEN = 64, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Weights by where they are: all, in the embedding and an untied head, in the layers."""

    total: int
    vocabulary: int

    @property
    def layers(self) -> int:
        """Everything but embedding and head."""
        return self.total - self.vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes at the peak of a step.

    Attributes:
        weights: the model's, and a frozen parent's where the run distils from a copy.
        training: gradients and optimizer moments.
        activations: kept for the backward pass, where responses fill whole rows.
    """

    weights: int
    training: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.training + self.activations


def count_parameters(config: DecoderConfig) -> ParameterCount:
    """Counted on a model without memory; a tied head counts once."""
    with torch.device("meta"):
        named = dict(Decoder(config).named_parameters())
    vocabulary = sum(p.numel() for name, p in named.items() if name.startswith(("embedding.", "head.")))
    return ParameterCount(total=sum(p.numel() for p in named.values()), vocabulary=vocabulary)


def estimate_memory(config: DecoderConfig, train: TrainConfig, *, adapter: AdapterConfig | None) -> MemoryEstimate:
    """Memory of full training, or of an adapter, with the rows of `train`; small buffers are left out."""
    count = count_parameters(config)
    views = train.objective.noise.num_views
    clean, noisy = train.micro * train.row_len, views * train.micro * train.row_len
    weights = FP32_BYTES * count.total
    if adapter is None:
        trained = count.layers + (0 if train.optim.freeze_embeddings else count.vocabulary)
        if train.objective.distill_weight:
            shared = count.vocabulary if train.optim.freeze_embeddings else 0
            weights += FP32_BYTES * (count.total - shared)
        tokens = clean + noisy
    else:
        trained = count_adapter(config, adapter)
        weights += FP32_BYTES * trained
        # The clean stream is the frozen parent and keeps nothing for a backward pass but its keys and values.
        tokens = noisy
    return MemoryEstimate(
        weights=weights,
        training=OPTIMIZER_COPIES * FP32_BYTES * trained,
        activations=tokens * config.num_layers * layer_activation_bytes(config, bf16=train.precision == "bf16"),
    )


def layer_activation_bytes(config: DecoderConfig, *, bf16: bool) -> int:
    """What a token leaves in one layer for the backward pass: inputs of norms, products, attention and activation."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # The residual stream, its norms and the rotated queries and keys stay in fp32.
    kept = 5 * config.hidden_size + q_size + kv_size
    products = 2 * config.hidden_size + 2 * q_size + 3 * kv_size + 4 * config.intermediate_size
    return FP32_BYTES * kept + (2 if bf16 else FP32_BYTES) * products


def count_adapter(config: DecoderConfig, adapter: AdapterConfig) -> int:
    """Trained weights of an adapter."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    sides = {
        "q_proj": hidden + q_size,
        "k_proj": hidden + kv_size,
        "v_proj": hidden + kv_size,
        "o_proj": q_size + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    return config.num_layers * adapter.rank * sum(sides[name] for name in adapter.targets)


def flops_per_token(config: DecoderConfig) -> int:
    """Of a computed position, forward and backward: 6 a weight of the layers, and the head where a loss needs it.

    Attention's own products are left out: rows are short against the model's width.
    """
    count = count_parameters(config)
    return 6 * (count.layers + config.vocab_size * config.hidden_size // 2)


def measure_speed(
    config: DecoderConfig, train: TrainConfig, *, mask_token_id: int, clock: Clock, device: str, limit_s: float
) -> float:
    """Computed positions a second of this training on this machine, from a trial on a random model of its widths.

    A model above `TRIAL_PARAMETERS` is tried with some layers and with one: what a layer costs is the difference,
    and the rest of the stack is added by it. Memory stays that of the trial.

    Args:
        limit_s: no trial is begun after it; one on each size always is.
    """
    config = replace(config, vocab_size=max(config.vocab_size, mask_token_id + 1), rope_layers=None)
    num_layers = _count_trial_layers(config)
    batch = build_trial_batch(replace(config, num_layers=num_layers), train, mask_token_id=mask_token_id)

    def time_trial(layers: int) -> float:
        part = replace(config, num_layers=layers)
        return _time_trial(part, train, batch, mask_token_id, clock, device, limit_s / 2)

    tried_s = time_trial(num_layers)
    if num_layers < config.num_layers:
        # Of two timings on a busy machine the smaller model's may be the longer.
        layer_s = max(tried_s - time_trial(1), 0.1 * tried_s) / (num_layers - 1)
        tried_s += (config.num_layers - num_layers) * layer_s
    return len(batch.token_ids_L) / tried_s


def _count_trial_layers(config: DecoderConfig) -> int:
    one, two = (count_parameters(replace(config, num_layers=n)).total for n in (1, 2))
    return min(config.num_layers, max(2, 1 + (TRIAL_PARAMETERS - one) // (two - one)))


def build_trial_batch(config: DecoderConfig, train: TrainConfig, *, mask_token_id: int) -> TrainingBatch:
    """One row of random ids, half of it response, in the run's own layout."""
    streams = 1 + train.objective.noise.num_views
    count = count_parameters(config)
    flops = 6 * (count.layers + count.vocabulary) * streams
    block_size = train.objective.block_sizes[-1]
    length = int(min(train.row_len, TRIAL_MAX_LEN, max(TRIAL_FLOPS // flops, TRIAL_MIN_LEN)))
    length = max(length, 2 * block_size)
    row = PackedRow(
        row_id=0,
        token_ids=np.arange(length, dtype=np.int64) % min(config.vocab_size, 200),
        document_starts=np.array([0]),
        document_lens=np.array([length]),
        prompt_lens=np.array([length // 2]),
    )
    objective = train.objective
    settings = BatchSettings(
        block_size=block_size,
        shift_logits=objective.shift_logits,
        clean_attention=objective.clean_attention,
        mask_token_id=mask_token_id,
        end_token_id=0,
        nelbo_weighted=objective.nelbo_weighted,
        with_causal=objective.ar_weight > 0,
        anchor=objective.anchor,
    )
    return build_batch(
        [row], settings, keyed_noise(objective.noise, shift_logits=objective.shift_logits, seed=0, step=0)
    )


def _time_trial(
    config: DecoderConfig,
    train: TrainConfig,
    batch: TrainingBatch,
    mask_token_id: int,
    clock: Clock,
    device: str,
    limit_s: float,
) -> float:
    decoder = Decoder(config).to(device)
    if train.adapter is not None:
        GatedAdapter(decoder, train.adapter, mask_token_id=mask_token_id, seed=0)
    mask_row = MaskRow(decoder, mask_token_id) if train.optim.freeze_embeddings else None
    parameters = trained_parameters(decoder, mask_row)
    started_s, best_s, trials = clock.seconds(), float("inf"), 0
    # The first trial warms up; it counts only where there is time for no other.
    while trials < 1 or (trials < 8 and clock.seconds() - started_s < limit_s):
        before_s = clock.seconds()
        losses = accumulate_gradients(
            decoder,
            [batch],
            ar_weight=train.objective.ar_weight,
            mask_token_id=mask_token_id,
            precision=train.precision,
        )
        assert losses.num_tokens == len(batch.token_ids_L)
        taken_s, trials = clock.seconds() - before_s, trials + 1
        best_s = taken_s if trials == 2 else min(best_s, taken_s)
        for parameter in parameters.values():
            parameter.grad = None
    return best_s
