"""Cross-entropy over a large vocabulary by one fused kernel: Cut Cross-Entropy (Wijmans et al., 2024), on CUDA.

No logits are ever in memory. The kernel knows no forbidden token, so the mask token is taken out of the sum behind
it, which is the same mathematics: with m its logit and s the log-sum over all tokens, the log-sum over the others is
s + log(1 - exp(m - s)). Gradients are not filtered. The library is the extra `gpu`; the slow twin is
`diffusion/loss.py`.

Shape letters: P loss positions, E model dim, V vocabulary.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from ar2diff.diffusion.loss import ChunkedLosses

LIBRARY = "cut_cross_entropy"
_LARGEST_SHARE = 1.0 - 1e-6


def refuse_fused(device: torch.device, precision: str) -> str | None:
    """Why the kernel cannot be used on this device in this precision, or None where it can."""
    if device.type != "cuda":
        return f"the fused kernel runs on CUDA, not on {device.type}"
    if precision != "bf16":
        return f"the fused kernel computes in bf16, not in {precision}"
    if importlib.util.find_spec(LIBRARY) is None:
        return "cut-cross-entropy is not installed: it comes with ar2diff[gpu]"
    return None


def fused_losses(
    hidden_PE: Tensor,
    head_VE: Tensor,
    target_ids_P: Tensor,
    weights_P: Tensor,
    *,
    mask_token_id: int,
    logit_scale: float = 1.0,
) -> ChunkedLosses:
    """What `chunked_losses` returns without a teacher; gradients reach hidden states and head by autograd.

    Args:
        target_ids_P: never the mask token.
    """
    kernel = _load_kernel()
    if torch.is_autocast_enabled(hidden_PE.device.type):
        dtype = torch.get_autocast_dtype(hidden_PE.device.type)
        hidden_PE, head_VE = hidden_PE.to(dtype), head_VE.to(dtype)
    if logit_scale != 1.0:
        hidden_PE = hidden_PE * logit_scale
    nll_P = kernel(hidden_PE, head_VE, target_ids_P, reduction="none", filter_eps=None).float()
    nll_P = nll_P + _without_mask(nll_P, hidden_PE.float(), head_VE, target_ids_P, mask_token_id)
    loss = (nll_P * weights_P).sum()
    return ChunkedLosses(loss, nll_P.detach(), torch.zeros_like(weights_P))


def _without_mask(
    nll_P: Tensor, hidden_PE: Tensor, head_VE: Tensor, target_ids_P: Tensor, mask_token_id: int
) -> Tensor:
    target_logit_P = (hidden_PE * head_VE[target_ids_P].float()).sum(dim=1)
    mask_logit_P = hidden_PE @ head_VE[mask_token_id].float()
    mask_share_P = (mask_logit_P - (nll_P + target_logit_P)).exp().clamp_max(_LARGEST_SHARE)
    return torch.log1p(-mask_share_P)


def _load_kernel() -> Any:
    from cut_cross_entropy import linear_cross_entropy  # slow to import, and only where there is a GPU

    return linear_cross_entropy
