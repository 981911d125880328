"""Attention for training sequences that computes no masked-out tile: the CPU path, and right on any device.

One autograd function walks the tiles of a `RowLayout`. Each tile's scores live only while it is worked on; the
backward pass computes them again (as FlashAttention does, Dao et al., 2022). No (L, L) tensor exists, and grouped
queries read their keys without copies.

Shape letters: L sequence, T queries of a tile, M keys of a tile, H query heads, K kv heads, R query heads per kv
head, D head dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ar2diff.attention.layout import AttentionTile, RowLayout, build_tiles
from ar2diff.attention.ops import LayerAttend

DEFAULT_TILE_SIZE = 128


def tiled_attend(layout: RowLayout, scale: float, *, tile_size: int = DEFAULT_TILE_SIZE) -> LayerAttend:
    """An `Attend` for the one sequence (batch 1) that `layout` describes; equal to the dense mask, with gradients."""
    tiles = [BiasedTile(tile, bias_of(tile)) for tile in build_tiles(layout, tile_size=tile_size)]

    def attend(layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        del layer_idx
        assert q_BLHD.shape[0] == 1
        # Under autocast rotary positions leave q and k wider than v.
        q_KRLD = heads_first((q_BLHD * scale).to(v_BLKD.dtype), k_BLKD.shape[2])
        k_KLD, v_KLD = k_BLKD[0].to(v_BLKD.dtype).transpose(0, 1), v_BLKD[0].transpose(0, 1)
        out: Tensor = TiledAttention.apply(q_KRLD, k_KLD, v_KLD, tiles)  # type: ignore[no-untyped-call]
        return out.flatten(0, 1).transpose(0, 1)[None]

    return attend


def heads_first(q_BLHD: Tensor, num_kv_heads: int) -> Tensor:
    """Queries as (K, R, L, D), grouped by the kv head they read."""
    length, num_heads, head_dim = q_BLHD.shape[1:]
    return q_BLHD.reshape(length, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)


class BiasedTile(NamedTuple):
    """A tile and its mask as numbers to add to scores: 0 or -inf."""

    tile: AttentionTile
    bias_TM: Tensor


def bias_of(tile: AttentionTile) -> Tensor:
    """What to add to a tile's scores behind its open keys: 0 or -inf."""
    return torch.zeros(tile.mask_TM.shape).masked_fill_(~tile.mask_TM, float("-inf"))


class TiledAttention(torch.autograd.Function):
    """softmax(q k^T) v over tiles, the queries scaled beforehand; see the module's text."""

    @staticmethod
    def forward(ctx: Any, q_KRLD: Tensor, k_KLD: Tensor, v_KLD: Tensor, tiles: Sequence[BiasedTile]) -> Tensor:
        """Attended values, shape (K, R, L, D)."""
        k_KLD, v_KLD = k_KLD.contiguous(), v_KLD.contiguous()
        # Laid out as (L, K, R, D), which is what the output projection reads.
        out = torch.empty_like(q_KRLD.permute(2, 0, 1, 3), memory_format=torch.contiguous_format).permute(1, 2, 0, 3)
        for tile, bias_TM in tiles:
            q, k, v = _gather(q_KRLD, tile), _keys(k_KLD, tile), _keys(v_KLD, tile)
            weights = tile_weights(q, k, tile, bias_TM)
            out[:, :, tile.queries] = torch.matmul(weights, v).view(*q_KRLD.shape[:2], -1, q.shape[-1])
        ctx.save_for_backward(q_KRLD, k_KLD, v_KLD, out)
        ctx.tiles = tiles
        return out

    @staticmethod
    def backward(ctx: Any, grad_KRLD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of q, k and v, the weights computed again tile by tile."""
        q_KRLD, k_KLD, v_KLD, out = ctx.saved_tensors
        dot_KRL = (grad_KRLD * out).sum(-1, dtype=torch.float32)
        dq = torch.empty_like(q_KRLD.permute(2, 0, 1, 3), memory_format=torch.contiguous_format).permute(1, 2, 0, 3)
        dk, dv = torch.zeros_like(k_KLD, dtype=torch.float32), torch.zeros_like(v_KLD, dtype=torch.float32)
        for tile, bias_TM in ctx.tiles:
            q, k, v = _gather(q_KRLD, tile), _keys(k_KLD, tile), _keys(v_KLD, tile)
            grad = _gather(grad_KRLD, tile)
            weights = tile_weights(q, k, tile, bias_TM)
            dot = dot_KRL[:, :, tile.queries].reshape(q.shape[0], -1, 1)
            slope = torch.matmul(grad, v.transpose(1, 2)).sub_(dot).mul_(weights).to(q.dtype)
            dq[:, :, tile.queries] = torch.matmul(slope, k).view(*q_KRLD.shape[:2], -1, q.shape[-1])
            _add_keys(dk, torch.matmul(slope.transpose(1, 2), q), tile)
            _add_keys(dv, torch.matmul(weights.transpose(1, 2), grad), tile)
        return dq, dk.to(k_KLD.dtype), dv.to(v_KLD.dtype), None


def _gather(x_KRLD: Tensor, tile: AttentionTile) -> Tensor:
    # (K, R * T, D): the query heads of one kv head are more rows of the same product.
    return x_KRLD[:, :, tile.queries].flatten(1, 2)


def _keys(x_KLD: Tensor, tile: AttentionTile) -> Tensor:
    context = x_KLD[:, tile.context]
    return context if tile.own.start == tile.own.stop else torch.cat((context, x_KLD[:, tile.own]), dim=1)


def _add_keys(total_KLD: Tensor, part_KMD: Tensor, tile: AttentionTile) -> None:
    num_context = tile.context.stop - tile.context.start
    total_KLD[:, tile.context] += part_KMD[:, :num_context]
    if tile.own.start != tile.own.stop:
        total_KLD[:, tile.own] += part_KMD[:, num_context:]


def tile_weights(q_KQD: Tensor, k_KMD: Tensor, tile: AttentionTile, bias_TM: Tensor) -> Tensor:
    """The softmax weights of one tile, shape (K, R * T, M)."""
    scores = torch.matmul(q_KQD, k_KMD.transpose(1, 2)).float()
    by_query = scores.view(scores.shape[0], -1, len(bias_TM), scores.shape[-1])
    by_query[..., tile.num_open :] += bias_TM.to(scores.device)
    return scores.softmax(-1).to(q_KQD.dtype)
