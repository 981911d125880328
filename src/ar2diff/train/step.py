"""One optimizer step's gradients: forward, loss and backward over the micro-batches of a global batch.

Losses are normalised by the global batch's counts before any backward pass, so that the gradient does not depend on
how the batch is cut. Shape letters: L sequence, P loss positions, E model dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ar2diff.attention.flex import flex_attend
from ar2diff.attention.tiled import tiled_attend
from ar2diff.diffusion.loss import chunked_cross_entropy
from ar2diff.models.decoder import Decoder
from ar2diff.models.layers import Attend
from ar2diff.train.batch import TrainingBatch

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLosses:
    """Means over a global batch, in nats; None where no position carries that loss."""

    diffusion: float | None
    ar: float | None
    num_tokens: int
    num_loss_tokens: int


def build_attend(batch: TrainingBatch, decoder: Decoder) -> Attend:
    """The sparse attention path of the decoder's device: tiles on the CPU, FlexAttention on CUDA."""
    scale = decoder.config.softmax_scale
    device = decoder.embedding.weight.device
    if device.type == "cuda":
        return flex_attend(batch.layout, scale, device=device, compiled=True)
    return tiled_attend(batch.layout, scale)


def forward_nll(
    decoder: Decoder, batch: TrainingBatch, weights_P: Tensor, *, mask_token_id: int, attend: Attend | None = None
) -> tuple[Tensor, Tensor]:
    """The weighted loss (with gradients) and each position's loss in nats, shape (P,)."""
    device = decoder.embedding.weight.device
    token_ids_1L = batch.token_ids_L[None].to(device)
    position_ids_1L = batch.layout.places.position_idx[None].to(device)
    hidden_1LE = decoder(token_ids_1L, position_ids_1L, attend or build_attend(batch, decoder))
    return chunked_cross_entropy(
        hidden_1LE[0].index_select(0, batch.logit_idx_P.to(device)),
        decoder.head_weight,
        batch.target_ids_P.to(device),
        weights_P.to(device),
        mask_token_id=mask_token_id,
        logit_scale=decoder.config.logit_scale,
    )


def accumulate_gradients(
    decoder: Decoder,
    batches: Sequence[TrainingBatch],
    *,
    ar_weight: float,
    mask_token_id: int,
    precision: Precision,
) -> StepLosses:
    """Add the gradients of the global batch to the decoder's; returns its mean losses."""
    diffusion_scale = sum(batch.diffusion_scale for batch in batches)
    num_causal = sum(batch.num_causal for batch in batches)
    sums = [0.0, 0.0]
    for batch in batches:
        weights_P = batch.weights_P.clone()
        weights_P[: batch.num_diffusion] /= max(diffusion_scale, 1)
        weights_P[batch.num_diffusion :] *= ar_weight / max(num_causal, 1)
        device_type = decoder.embedding.weight.device.type
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss, nll_P = forward_nll(decoder, batch, weights_P, mask_token_id=mask_token_id)
        loss.backward()  # type: ignore[no-untyped-call]
        weighted_P = nll_P.cpu() * batch.weights_P
        sums[0] += float(weighted_P[: batch.num_diffusion].sum(dtype=torch.float64))
        sums[1] += float(weighted_P[batch.num_diffusion :].sum(dtype=torch.float64))
    return StepLosses(
        diffusion=sums[0] / diffusion_scale if diffusion_scale else None,
        ar=sums[1] / num_causal if num_causal else None,
        num_tokens=sum(len(batch.token_ids_L) for batch in batches),
        num_loss_tokens=sum(len(batch.logit_idx_P) for batch in batches),
    )
