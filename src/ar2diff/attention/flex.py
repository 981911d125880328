"""Attention for training sequences through torch's FlexAttention: the GPU path. The mask is the one predicate.

The block mask is built once per sequence and serves all layers; no dense (L, L) mask is built on the GPU, where the
mask's construction is compiled too. FlexAttention: Dong et al., 2024.

Shape letters: B batch (1), L sequence, H query heads, K kv heads, D head dim.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ar2diff.attention.layout import RowLayout
from ar2diff.attention.masks import CleanAttention, TokenPlaces, is_visible
from ar2diff.attention.ops import LayerAttend


def build_mask_mod(layout: RowLayout, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The visibility rule as FlexAttention's `mask_mod(batch, head, query, key)` of one pair."""
    places = _on_device(layout.places, device)
    return _mask_mod(places, places, layout.clean_attention)


def _mask_mod(
    queries: TokenPlaces, keys: TokenPlaces, clean_attention: CleanAttention
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return is_visible(queries.select(query), keys.select(key), clean_attention=clean_attention)

    return mask_mod


def _on_device(places: TokenPlaces, device: torch.device) -> TokenPlaces:
    return TokenPlaces(
        document_idx=places.document_idx.to(device),
        stream_idx=places.stream_idx.to(device),
        block_idx=places.block_idx.to(device),
        position_idx=places.position_idx.to(device),
    )


def flex_attend(layout: RowLayout, scale: float, *, device: torch.device, compiled: bool) -> LayerAttend:
    """An `Attend` for the one sequence that `layout` describes.

    Args:
        compiled: compile the kernel and the mask's construction; without it torch computes densely, for tests.
    """
    return flex_between(
        layout.places,
        layout.places,
        scale,
        clean_attention=layout.clean_attention,
        device=device,
        compiled=compiled,
    )


def flex_between(
    queries: TokenPlaces,
    keys: TokenPlaces,
    scale: float,
    *,
    clean_attention: CleanAttention,
    device: torch.device,
    compiled: bool,
) -> LayerAttend:
    """An `Attend` of one sequence's queries over keys that may be others; see `flex_attend`."""
    mask_mod = _mask_mod(_on_device(queries, device), _on_device(keys, device), clean_attention)
    block_mask: BlockMask = create_block_mask(
        mask_mod, None, None, len(queries), len(keys), device=str(device), _compile=compiled
    )
    kernel = _compiled_flex() if compiled else flex_attention

    def attend(layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        del layer_idx
        q, k, v = (x.to(v_BLKD.dtype).transpose(1, 2) for x in (q_BLHD, k_BLKD, v_BLKD))
        out: Tensor = kernel(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return attend


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)
