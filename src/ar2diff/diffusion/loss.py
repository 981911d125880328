"""Cross-entropy over a large vocabulary in bounded memory: logits exist for one chunk of positions at a time.

The forward pass computes each chunk's gradient while its logits are at hand, so nothing is computed twice and no
(P, V) tensor exists. Softmax is in fp32; the mask token's logit is -inf.

Shape letters: P loss positions, C positions of a chunk, E model dim, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

DEFAULT_CHUNK_SIZE = 256


def chunked_cross_entropy(
    hidden_PE: Tensor,
    head_weight_VE: Tensor,
    target_ids_P: Tensor,
    weights_P: Tensor,
    *,
    mask_token_id: int,
    logit_scale: float = 1.0,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of -log p(target), and each position's unweighted value.

    Args:
        hidden_PE: hidden states after the final norm.
        weights_P: fp32 weights; the caller divides by the global number of positions.

    Returns:
        The sum (a scalar with gradients to hidden states and, where it is trained, the head), and (P,) losses in nats
        without gradients.
    """
    loss, nll_P = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_PE, head_weight_VE, target_ids_P, weights_P, mask_token_id, logit_scale, chunk_size
    )
    return loss, nll_P


class ChunkedCrossEntropy(torch.autograd.Function):
    """See `chunked_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PE: Tensor,
        head_VE: Tensor,
        target_ids_P: Tensor,
        weights_P: Tensor,
        mask_token_id: int,
        logit_scale: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Loss and per-position losses; gradients are kept for `backward`."""
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_PE) if needs_hidden else None
        grad_head = torch.zeros_like(head_VE) if needs_head else None
        nll_P = torch.empty(len(hidden_PE), dtype=torch.float32, device=hidden_PE.device)
        for start in range(0, len(hidden_PE), chunk_size):
            chunk = slice(start, start + chunk_size)
            logits_CV = _logits(hidden_PE[chunk], head_VE, mask_token_id, logit_scale)
            targets_C1 = target_ids_P[chunk, None]
            nll_P[chunk], total_C1 = _exponentiate(logits_CV, targets_C1)
            if grad_hidden is None and grad_head is None:
                continue
            weights_C1 = weights_P[chunk, None] * logit_scale
            slope = _slope(logits_CV, total_C1, targets_C1, weights_C1).to(hidden_PE.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = slope @ head_VE
            if grad_head is not None:
                grad_head.addmm_(slope.t(), hidden_PE[chunk])
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(nll_P)
        return (nll_P * weights_P).sum(), nll_P

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients, scaled."""
        scaled = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return (*scaled, None, None, None, None, None)


def _logits(hidden_CE: Tensor, head_VE: Tensor, mask_token_id: int, logit_scale: float) -> Tensor:
    logits_CV = (hidden_CE @ head_VE.t()).float()
    if logit_scale != 1.0:
        logits_CV.mul_(logit_scale)
    logits_CV[:, mask_token_id] = float("-inf")
    return logits_CV


def _exponentiate(logits_CV: Tensor, targets_C1: Tensor) -> tuple[Tensor, Tensor]:
    # Turns logits into exp(logit - largest) in place: one exponential for each, for loss and gradient together.
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    target_logit_C1 = logits_CV.gather(1, targets_C1)
    total_C1 = logits_CV.sub_(largest_C1).exp_().sum(dim=1, keepdim=True)
    return (total_C1.log() + largest_C1 - target_logit_C1)[:, 0], total_C1


def _slope(exp_CV: Tensor, total_C1: Tensor, targets_C1: Tensor, weights_C1: Tensor) -> Tensor:
    # d loss / d logits in place of the exponentials; exp(-inf) = 0 leaves the mask row without gradient.
    slope = exp_CV.mul_(weights_C1 / total_C1)
    return slope.scatter_add_(1, targets_C1, -weights_C1.to(slope.dtype))
