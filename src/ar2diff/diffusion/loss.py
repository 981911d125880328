"""Cross-entropy and distillation over a large vocabulary in bounded memory: logits exist for one chunk at a time.

The forward pass computes each chunk's gradient while its logits are at hand, so nothing is computed twice and no
(P, V) tensor exists. Softmax is in fp32; the mask token's logit is -inf, for the teacher too.

Distillation is the forward KL divergence from the teacher to the student at temperature 1, over the teacher's most
likely tokens and one bucket for all others.

Shape letters: P loss positions, C positions of a chunk, E model dim, V vocabulary, K the teacher's tokens.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    losses = chunked_losses(
        hidden_PE,
        head_weight_VE,
        target_ids_P,
        weights_P,
        mask_token_id=mask_token_id,
        logit_scale=logit_scale,
        chunk_size=chunk_size,
    )
    return losses.loss, losses.nll_P


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """What a student is distilled from, at the same positions.

    Attributes:
        hidden_PE: the teacher's hidden states after its final norm.
        head_VE: its output matrix.
        weights_P: fp32 weights of the divergence; 0 where there is no teacher.
        top_k: its tokens that are told apart; None for the whole vocabulary.
    """

    hidden_PE: Tensor
    head_VE: Tensor
    weights_P: Tensor
    top_k: int | None


class ChunkedLosses(NamedTuple):
    """The weighted sum of both losses with gradients, and (P,) of each in nats, unweighted, without gradients."""

    loss: Tensor
    nll_P: Tensor
    kl_P: Tensor


def chunked_losses(
    hidden_PE: Tensor,
    head_weight_VE: Tensor,
    target_ids_P: Tensor,
    weights_P: Tensor,
    *,
    mask_token_id: int,
    teacher: Teacher | None = None,
    logit_scale: float = 1.0,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> ChunkedLosses:
    """`chunked_cross_entropy` plus the weighted divergence from a teacher, on the same logits.

    Args:
        teacher: carries no gradient; None leaves the divergence out, its values are then 0.
    """
    losses = _ChunkedLosses.apply(  # type: ignore[no-untyped-call]
        hidden_PE, head_weight_VE, target_ids_P, weights_P, mask_token_id, teacher, logit_scale, chunk_size
    )
    return ChunkedLosses(*losses)


class _ChunkedLosses(torch.autograd.Function):
    """See `chunked_losses`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PE: Tensor,
        head_VE: Tensor,
        target_ids_P: Tensor,
        weights_P: Tensor,
        mask_token_id: int,
        teacher: Teacher | None,
        logit_scale: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and per-position losses; gradients are kept for `backward`."""
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_PE) if needs_hidden else None
        grad_head = torch.zeros_like(head_VE) if needs_head else None
        nll_P = torch.empty(len(hidden_PE), dtype=torch.float32, device=hidden_PE.device)
        kl_P = torch.zeros_like(nll_P)
        for start in range(0, len(hidden_PE), chunk_size):
            chunk = slice(start, start + chunk_size)
            lesson = None if teacher is None else _read_teacher(teacher, chunk, mask_token_id, logit_scale)
            logits_CV = _logits(hidden_PE[chunk], head_VE, mask_token_id, logit_scale)
            targets_C1 = target_ids_P[chunk, None]
            nll_P[chunk], total_C1 = _exponentiate(logits_CV, targets_C1)
            if lesson is not None:
                kl_P[chunk] = lesson.compare(logits_CV, total_C1)
            if grad_hidden is None and grad_head is None:
                continue
            slope = _slope(logits_CV, total_C1, targets_C1, weights_P[chunk, None], lesson)
            slope = (slope if logit_scale == 1.0 else slope.mul_(logit_scale)).to(hidden_PE.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = slope @ head_VE
            if grad_head is not None:
                grad_head.addmm_(slope.t(), hidden_PE[chunk])
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(nll_P, kl_P)
        loss = (nll_P * weights_P).sum()
        return (loss if teacher is None else loss + (kl_P * teacher.weights_P).sum()), nll_P, kl_P

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The kept gradients, scaled."""
        scaled = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return (*scaled, None, None, None, None, None, None)


class _Lesson:
    """A chunk of the teacher's distribution: its likely tokens and the rest; compares a student's with it."""

    def __init__(self, ids_CK: Tensor, probs_CK: Tensor, rest_C1: Tensor, weights_C1: Tensor) -> None:
        self.ids_CK, self.probs_CK, self.rest_C1, self.weights_C1 = ids_CK, probs_CK, rest_C1, weights_C1
        self._student_rest_C1 = rest_C1

    def compare(self, exp_CV: Tensor, total_C1: Tensor) -> Tensor:
        """The divergence in nats, shape (C,); `exp_CV / total_C1` are the student's probabilities."""
        told_CK = exp_CV.gather(1, self.ids_CK)
        # The rest is summed, not subtracted from 1, so that a small one keeps its digits.
        rest_C1 = exp_CV.scatter_(1, self.ids_CK, 0.0).sum(dim=1, keepdim=True)
        exp_CV.scatter_(1, self.ids_CK, told_CK)
        tiny = torch.finfo(exp_CV.dtype).tiny
        self._student_rest_C1 = (rest_C1 / total_C1).clamp_min(tiny)
        probs_CK = (told_CK / total_C1).clamp_min(tiny)
        told_C = (torch.xlogy(self.probs_CK, self.probs_CK) - self.probs_CK * probs_CK.log()).sum(dim=1)
        rest_C1 = torch.xlogy(self.rest_C1, self.rest_C1) - self.rest_C1 * self._student_rest_C1.log()
        return told_C + rest_C1[:, 0]

    def add_slope(self, slope_CV: Tensor, exp_CV: Tensor, total_C1: Tensor) -> Tensor:
        """Add d divergence / d logits, weighted: q - p at the told tokens, q (1 - rest_p / rest_q) elsewhere."""
        other_C1 = self.weights_C1 * (1.0 - self.rest_C1 / self._student_rest_C1) / total_C1
        told_CK = self.weights_C1 * (exp_CV.gather(1, self.ids_CK) / total_C1 - self.probs_CK)
        told_CK += slope_CV.gather(1, self.ids_CK)
        return slope_CV.addcmul_(exp_CV, other_C1).scatter_(1, self.ids_CK, told_CK)


def _read_teacher(teacher: Teacher, chunk: slice, mask_token_id: int, logit_scale: float) -> _Lesson:
    probs_CV = _logits(teacher.hidden_PE[chunk], teacher.head_VE, mask_token_id, logit_scale).softmax(dim=1)
    # The mask token is never told apart: it has no probability on either side.
    count = probs_CV.shape[1] - 1 if teacher.top_k is None else min(teacher.top_k, probs_CV.shape[1] - 1)
    probs_CK, ids_CK = probs_CV.topk(count, dim=1)
    rest_C1 = probs_CV.scatter_(1, ids_CK, 0.0).sum(dim=1, keepdim=True)
    return _Lesson(ids_CK, probs_CK, rest_C1, teacher.weights_P[chunk, None])


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


def _slope(
    exp_CV: Tensor, total_C1: Tensor, targets_C1: Tensor, weights_C1: Tensor, lesson: _Lesson | None
) -> Tensor:
    # d loss / d logits; without a lesson in place of the exponentials. exp(-inf) = 0 leaves the mask row alone.
    if lesson is None:
        slope_CV = exp_CV.mul_(weights_C1 / total_C1)
    else:
        slope_CV = lesson.add_slope(exp_CV * (weights_C1 / total_C1), exp_CV, total_C1)
    return slope_CV.scatter_add_(1, targets_C1, -weights_C1.to(slope_CV.dtype))
