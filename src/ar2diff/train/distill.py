"""Distillation from the frozen parent: its next-token distribution at the tokens that the views have masked.

The parent reads the clean text causally; its state before a token is the teacher for that token, whichever position
of a noisy view predicts it. With a mask-gated adapter the clean stream is the parent, so the teacher costs nothing.
Otherwise a frozen copy of the base runs beside the student; it shares the embedding and the head where they are
frozen, and its memory is the weights of its layers.

Shape letters: P loss positions, C clean tokens, E model dim.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ar2diff.attention.layout import RowLayout
from ar2diff.attention.noisy import split_layout
from ar2diff.diffusion.loss import Teacher
from ar2diff.models.decoder import Decoder
from ar2diff.train.batch import TrainingBatch
from ar2diff.train.forward import HiddenStates, forward_clean


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """How a student is distilled.

    Attributes:
        weight: of the divergence, against 1 for the cross-entropy.
        top_k: the parent's tokens that are told apart; None for all.
        parent: the frozen parent, or None where the student's clean stream is the parent.
    """

    weight: float
    top_k: int | None
    shift_logits: bool
    parent: Decoder | None

    @property
    def num_bytes(self) -> int:
        """Memory of the parent's own weights, those shared with the student left out."""
        if self.parent is None:
            return 0
        return sum(p.numel() * p.element_size() for p in self.parent.layers.parameters())


def copy_parent(decoder: Decoder, *, share_embeddings: bool) -> Decoder:
    """A frozen copy of the decoder as it is now, before anything of its training hangs on it.

    Args:
        share_embeddings: keep embedding and head in common with the decoder, which must not train them.
    """
    shared = [decoder.embedding.weight] + ([] if decoder.config.tied_head else [decoder.head.weight])
    parent = copy.deepcopy(decoder, {id(weight): weight for weight in shared} if share_embeddings else {})
    for name, parameter in parent.named_parameters():
        if not (share_embeddings and name.startswith(("embedding.", "head."))):
            parameter.requires_grad_(False)
    return parent.eval()


def build_teacher(
    distillation: Distillation, decoder: Decoder, batch: TrainingBatch, states: HiddenStates, *, num_tokens: int
) -> Teacher:
    """The parent's states for the batch's diffusion positions.

    Args:
        num_tokens: diffusion positions of the whole global batch, which the divergence is a mean over.
    """
    parent = decoder if distillation.parent is None else distillation.parent
    clean_CE = states.clean_CE
    if clean_CE is None:
        clean_CE = forward_clean(parent, batch, split_layout(batch.layout, clean_attention="causal"))
    logit_idx = batch.logit_idx_P[: batch.num_diffusion]
    state_idx, has_teacher = teacher_positions(batch.layout, logit_idx, shift_logits=distillation.shift_logits)
    weights = has_teacher.float() * (distillation.weight / max(num_tokens, 1))
    return Teacher(
        hidden_PE=clean_CE.index_select(0, state_idx.to(clean_CE.device)),
        head_VE=parent.head_weight.detach(),
        weights_P=weights.to(clean_CE.device),
        top_k=distillation.top_k,
    )


def teacher_positions(layout: RowLayout, logit_idx_P: Tensor, *, shift_logits: bool) -> tuple[Tensor, Tensor]:
    """For each diffusion position the clean token before its target, and whether there is one.

    Returns:
        Indices among the clean tokens, (P,), 0 where there is none; and a boolean (P,).
    """
    clean_lens = torch.tensor([span.noisy_start - span.start for span in layout.spans])
    first_clean = clean_lens.cumsum(0) - clean_lens
    before_target = layout.places.position_idx[logit_idx_P] + (0 if shift_logits else -1)
    has_teacher = before_target >= 0
    state_idx = first_clean[layout.places.document_idx[logit_idx_P]] + before_target
    return state_idx.where(has_teacher, torch.zeros_like(state_idx)), has_teacher
