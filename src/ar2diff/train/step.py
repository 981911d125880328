"""One optimizer step's gradients: forward, loss and backward over the micro-batches of a global batch.

Losses are normalised by the global batch's counts before any backward pass, so that the gradient does not depend on
how the batch is cut. Shape letters: L sequence, P loss positions, E model dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ar2diff.diffusion.fused import fused_losses
from ar2diff.diffusion.loss import ChunkedLosses, Teacher, chunked_cross_entropy, chunked_losses
from ar2diff.models.decoder import Decoder
from ar2diff.models.layers import Attend
from ar2diff.train.batch import TrainingBatch
from ar2diff.train.distill import Distillation, build_teacher, teacher_positions
from ar2diff.train.forward import forward_states
from ar2diff.train.parallel import Ranks

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLosses:
    """Means over a global batch, in nats; None where no position carries that loss."""

    diffusion: float | None
    ar: float | None
    distill: float | None
    num_tokens: int
    num_loss_tokens: int


def forward_nll(
    decoder: Decoder, batch: TrainingBatch, weights_P: Tensor, *, mask_token_id: int, attend: Attend | None = None
) -> tuple[Tensor, Tensor]:
    """The weighted loss (with gradients) and each position's loss in nats, shape (P,)."""
    device = decoder.embedding.weight.device
    states = forward_states(decoder, batch, attend=attend)
    return chunked_cross_entropy(
        states.at_positions_PE,
        decoder.head_weight,
        batch.target_ids_P.to(device),
        weights_P.to(device),
        mask_token_id=mask_token_id,
        logit_scale=decoder.config.logit_scale,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scales:
    """Counts of the whole global batch, which its losses are means over."""

    diffusion: int
    causal: int
    diffusion_tokens: int


def accumulate_gradients(
    decoder: Decoder,
    batches: Sequence[TrainingBatch],
    *,
    ar_weight: float,
    mask_token_id: int,
    precision: Precision,
    diffusion_weight: float = 1.0,
    distillation: Distillation | None = None,
    ranks: Ranks | None = None,
    fused: bool = False,
) -> StepLosses:
    """Add the gradients of the global batch to the decoder's; returns its mean losses.

    Args:
        diffusion_weight: of the cross-entropy of masked tokens.
        distillation: adds the divergence from the parent at the same tokens.
        ranks: of a parallel job; this one computes its share of the batches, the losses are those of all.
        fused: use the fused kernel where no teacher needs logits; the device must have it, see `diffusion/fused.py`.
    """
    scales = _Scales(
        diffusion=sum(batch.diffusion_scale for batch in batches),
        causal=sum(batch.num_causal for batch in batches),
        diffusion_tokens=sum(batch.num_diffusion for batch in batches),
    )
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in batches if ranks is None else ranks.share(batches):
        weights_P = batch.weights_P.clone()
        weights_P[: batch.num_diffusion] *= diffusion_weight / max(scales.diffusion, 1)
        weights_P[batch.num_diffusion :] *= ar_weight / max(scales.causal, 1)
        device_type = decoder.embedding.weight.device.type
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            parts = _forward_losses(decoder, batch, weights_P, mask_token_id, distillation, scales, fused=fused)
        # A batch without a masked token has nothing to learn from, nor a graph under an adapter.
        if trained := [part.loss for part in parts if part.loss.requires_grad]:
            torch.autograd.backward(trained)
        sums += _sum_losses(batch, parts, distillation)
    if ranks is not None:
        sums = ranks.sum(sums)
    return StepLosses(
        diffusion=float(sums[0]) / scales.diffusion if scales.diffusion else None,
        ar=float(sums[1]) / scales.causal if scales.causal else None,
        distill=float(sums[2] / sums[3]) if sums[3] else None,
        num_tokens=sum(len(batch.token_ids_L) for batch in batches),
        num_loss_tokens=sum(len(batch.logit_idx_P) for batch in batches),
    )


def _forward_losses(
    decoder: Decoder,
    batch: TrainingBatch,
    weights_P: Tensor,
    mask_token_id: int,
    distillation: Distillation | None,
    scales: _Scales,
    *,
    fused: bool,
) -> list[ChunkedLosses]:
    # The diffusion positions, which may have a teacher, and the clean stream's, which have none.
    states = forward_states(decoder, batch)
    device = states.at_positions_PE.device

    def losses_of(part: slice, teacher: Teacher | None) -> ChunkedLosses:
        hidden_PE, target_ids_P = states.at_positions_PE[part], batch.target_ids_P[part].to(device)
        logit_scale = decoder.config.logit_scale
        inputs = (hidden_PE, decoder.head_weight, target_ids_P, weights_P[part].to(device))
        if fused and teacher is None:
            return fused_losses(*inputs, mask_token_id=mask_token_id, logit_scale=logit_scale)
        return chunked_losses(*inputs, mask_token_id=mask_token_id, logit_scale=logit_scale, teacher=teacher)

    if distillation is None:
        return [losses_of(slice(None), None)]
    teacher = build_teacher(distillation, decoder, batch, states, num_tokens=scales.diffusion_tokens)
    return [losses_of(slice(batch.num_diffusion), teacher), losses_of(slice(batch.num_diffusion, None), None)]


def _sum_losses(batch: TrainingBatch, parts: Sequence[ChunkedLosses], distillation: Distillation | None) -> Tensor:
    # Diffusion, next-token and divergence sums, and how many tokens have a teacher.
    weighted_P = torch.cat([part.nll_P for part in parts]).cpu() * batch.weights_P
    sums = torch.zeros(4, dtype=torch.float64)
    sums[0] = weighted_P[: batch.num_diffusion].sum(dtype=torch.float64)
    sums[1] = weighted_P[batch.num_diffusion :].sum(dtype=torch.float64)
    if distillation is not None:
        _, has_teacher_P = teacher_positions(
            batch.layout, batch.logit_idx_P[: batch.num_diffusion], shift_logits=distillation.shift_logits
        )
        sums[2] = (parts[0].kl_P.cpu() * has_teacher_P).sum(dtype=torch.float64)
        sums[3] = has_teacher_P.sum()
    return sums
