"""Attention computed: plain functions of q, k, v and a boolean mask, grouped queries included.

Shape letters: B batch, L queries, M keys, H query heads, K kv heads, D head dim.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class LayerAttend(Protocol):
    """Attention of one layer over a whole sequence: the shape of what the functions below build."""

    def __call__(self, layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        """The attended values, shape (B, L, H, D)."""
        ...


def attend_reference(q_BLHD: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, mask_LM: Tensor, scale: float) -> Tensor:
    """Softmax attention written out in fp32: the slow twin of every other path. Returns (B, L, H, D)."""
    repeats = q_BLHD.shape[2] // k_BMKD.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2).float() for x in (k_BMKD, v_BMKD))
    scores = torch.einsum("blhd,bmhd->bhlm", q_BLHD.float(), k) * scale
    weights = scores.masked_fill(~mask_LM, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhlm,bmhd->blhd", weights, v).to(q_BLHD.dtype)


def attend_sdpa(
    q_BLHD: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, mask_LM: Tensor | None, scale: float, *, causal: bool = False
) -> Tensor:
    """The same through torch's fused kernel; `mask_LM=None` sees everything, or the causal triangle."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BMKD, v_BMKD))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask_LM, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def masked_attend(mask_LM: Tensor, scale: float) -> LayerAttend:
    """An `Attend` for a whole sequence under one dense mask: for tests and short reference runs."""

    def attend(layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        del layer_idx
        return attend_reference(q_BLHD, k_BLKD, v_BLKD, mask_LM, scale)

    return attend


def causal_attend(scale: float) -> LayerAttend:
    """An `Attend` for plain causal attention over the whole sequence, no cache."""

    def attend(layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        del layer_idx
        return attend_sdpa(q_BLHD, k_BLKD, v_BLKD, None, scale, causal=True)

    return attend
