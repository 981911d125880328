"""Attention of the noisy views alone, the clean stream's keys and values given as constants.

With a frozen clean stream its keys and values are computed once, without gradients; then only noisy queries are
worked on, and no gradient of a clean key is ever computed. Equal to the noisy rows of `attention/tiled.py`. On a GPU
the same runs through FlexAttention.

Shape letters: L noisy tokens, C clean tokens, H query heads, K kv heads, R query heads per kv head, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ar2diff.attention.flex import flex_between
from ar2diff.attention.layout import AttentionTile, DocumentShape, DocumentSpan, RowLayout, build_layout, build_tiles
from ar2diff.attention.masks import CleanAttention
from ar2diff.attention.ops import LayerAttend
from ar2diff.attention.tiled import DEFAULT_TILE_SIZE, BiasedTile, bias_of, heads_first, tile_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayout:
    """A training layout taken apart.

    Attributes:
        clean: the documents' clean streams alone, as a layout of their own.
        clean_idx_C, noisy_idx_L: where its tokens and the noisy ones stand in the whole sequence.
    """

    whole: RowLayout
    clean: RowLayout
    clean_idx_C: Tensor
    noisy_idx_L: Tensor


class ClosedContext(NamedTuple):
    """The clean keys and values of one layer, each (1, C, K, D)."""

    k_BCKD: Tensor
    v_BCKD: Tensor


def split_layout(layout: RowLayout, *, clean_attention: CleanAttention | None = None) -> SplitLayout:
    """Take the clean streams and the noisy views of a layout apart.

    Args:
        clean_attention: of the clean part, where it is not the layout's own.
    """
    no_views = torch.zeros(0, 1, dtype=torch.bool).numpy()
    shapes = [
        DocumentShape(num_tokens=span.noisy_start - span.start, prompt_len=prompt_len, block_views=no_views)
        for span, prompt_len in zip(layout.spans, layout.prompt_lens, strict=True)
    ]
    is_clean = layout.places.stream_idx == 0
    return SplitLayout(
        whole=layout,
        clean=build_layout(
            shapes, block_size=layout.block_size, clean_attention=clean_attention or layout.clean_attention
        ),
        clean_idx_C=is_clean.nonzero()[:, 0],
        noisy_idx_L=(~is_clean).nonzero()[:, 0],
    )


def recorded_attend(attend: LayerAttend, contexts: list[ClosedContext]) -> LayerAttend:
    """`attend`, each layer's keys and values appended to `contexts` in layer order."""

    def record(layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        assert layer_idx == len(contexts)
        contexts.append(ClosedContext(k_BLKD.to(v_BLKD.dtype), v_BLKD))
        return attend(layer_idx, q_BLHD, k_BLKD, v_BLKD)

    return record


def noisy_attend(
    split: SplitLayout, contexts: Sequence[ClosedContext], scale: float, *, tile_size: int = DEFAULT_TILE_SIZE
) -> LayerAttend:
    """An `Attend` for the noisy tokens of one sequence, over constant clean keys and values, in tiles."""
    tiles = [BiasedTile(tile, bias_of(tile)) for tile in _noisy_tiles(split.whole, tile_size)]

    def attend(layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        context = contexts[layer_idx]
        q_KRLD = heads_first((q_BLHD * scale).to(v_BLKD.dtype), k_BLKD.shape[2])
        k_KLD, v_KLD = k_BLKD[0].to(v_BLKD.dtype).transpose(0, 1), v_BLKD[0].transpose(0, 1)
        fixed = (context.k_BCKD[0].transpose(0, 1), context.v_BCKD[0].transpose(0, 1))
        out: Tensor = NoisyAttention.apply(q_KRLD, k_KLD, v_KLD, *fixed, tiles)  # type: ignore[no-untyped-call]
        return out.flatten(0, 1).transpose(0, 1)[None]

    return attend


def flex_noisy_attend(
    split: SplitLayout, contexts: Sequence[ClosedContext], scale: float, *, device: torch.device, compiled: bool
) -> LayerAttend:
    """The same through FlexAttention."""
    places = split.whole.places
    keys = places.select(torch.cat((split.clean_idx_C, split.noisy_idx_L)))
    kernel = flex_between(
        places.select(split.noisy_idx_L),
        keys,
        scale,
        clean_attention=split.whole.clean_attention,
        device=device,
        compiled=compiled,
    )

    def attend(layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        context = contexts[layer_idx]
        k = torch.cat((context.k_BCKD, k_BLKD.to(v_BLKD.dtype)), dim=1)
        return kernel(layer_idx, q_BLHD, k, torch.cat((context.v_BCKD, v_BLKD), dim=1))

    return attend


def _noisy_tiles(layout: RowLayout, tile_size: int) -> list[AttentionTile]:
    # Queries and own keys are counted among the noisy tokens, context among the clean ones.
    tiles: list[AttentionTile] = []
    num_clean = num_noisy = 0
    spans = iter(layout.spans)
    span = DocumentSpan(start=0, noisy_start=0, end=0)
    for tile in build_tiles(layout, tile_size=tile_size):
        while tile.queries.start >= span.end:
            num_clean, num_noisy = num_clean + span.noisy_start - span.start, num_noisy + span.end - span.noisy_start
            span = next(spans)
        if tile.own.start == tile.own.stop:
            continue
        queries = _moved(tile.queries, num_noisy - span.noisy_start)
        context = _moved(tile.context, num_clean - span.start)
        tiles.append(replace(tile, queries=queries, context=context, own=queries))
    return tiles


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


class NoisyAttention(torch.autograd.Function):
    """softmax(q k^T) v over tiles whose context carries no gradient; the weights are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q_KRLD: Tensor,
        k_KLD: Tensor,
        v_KLD: Tensor,
        context_k_KCD: Tensor,
        context_v_KCD: Tensor,
        tiles: Sequence[BiasedTile],
    ) -> Tensor:
        """Attended values, shape (K, R, L, D)."""
        out = _empty_like_rows(q_KRLD)
        for tile, bias_TM in tiles:
            q = q_KRLD[:, :, tile.queries].flatten(1, 2)
            k, v = _joined(context_k_KCD, k_KLD, tile), _joined(context_v_KCD, v_KLD, tile)
            weights = tile_weights(q, k, tile, bias_TM)
            out[:, :, tile.queries] = torch.matmul(weights, v).view(*q_KRLD.shape[:2], -1, q.shape[-1])
        ctx.save_for_backward(q_KRLD, k_KLD, v_KLD, context_k_KCD, context_v_KCD, out)
        ctx.tiles = tiles
        return out

    @staticmethod
    def backward(ctx: Any, grad_KRLD: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the noisy q, k and v."""
        q_KRLD, k_KLD, v_KLD, context_k_KCD, context_v_KCD, out = ctx.saved_tensors
        dot_KRL = (grad_KRLD * out).sum(-1, dtype=torch.float32)
        dq = _empty_like_rows(q_KRLD)
        # Each noisy token is a key of its own tile alone.
        dk, dv = torch.zeros_like(k_KLD), torch.zeros_like(v_KLD)
        for tile, bias_TM in ctx.tiles:
            q, grad = q_KRLD[:, :, tile.queries].flatten(1, 2), grad_KRLD[:, :, tile.queries].flatten(1, 2)
            k, v = _joined(context_k_KCD, k_KLD, tile), _joined(context_v_KCD, v_KLD, tile)
            weights = tile_weights(q, k, tile, bias_TM)
            dot = dot_KRL[:, :, tile.queries].reshape(q.shape[0], -1, 1)
            slope = torch.matmul(grad, v.transpose(1, 2)).sub_(dot).mul_(weights).to(q.dtype)
            dq[:, :, tile.queries] = torch.matmul(slope, k).view(*q_KRLD.shape[:2], -1, q.shape[-1])
            first_own = tile.context.stop - tile.context.start
            dk[:, tile.own] = torch.matmul(slope[:, :, first_own:].transpose(1, 2), q)
            dv[:, tile.own] = torch.matmul(weights[:, :, first_own:].transpose(1, 2), grad)
        return dq, dk, dv, None, None, None


def _joined(context_KCD: Tensor, own_KLD: Tensor, tile: AttentionTile) -> Tensor:
    return torch.cat((context_KCD[:, tile.context], own_KLD[:, tile.own]), dim=1)


def _empty_like_rows(x_KRLD: Tensor) -> Tensor:
    # Laid out as (L, K, R, D), which is what the output projection reads.
    rows = torch.empty_like(x_KRLD.permute(2, 0, 1, 3), memory_format=torch.contiguous_format)
    return rows.permute(1, 2, 0, 3)
