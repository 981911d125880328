"""A decoder's weights in int8, in the order in which the C code reads them.

Each group of 32 inputs of an output channel has one scale: absmax / 127, rounded to bfloat16 before the weights are
divided by it. Weights are stored as value + 128, four inputs of one output side by side, which is how the processor's
byte products read them. All of a model's weights lie in one piece of memory, in order of use.

Shape letters: N output channels, K inputs.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ar2diff.engine.native.library import GROUP, TILE, Matrix
from ar2diff.models.adapters import GatedAdapter


def pack_matrix(weight_NK: Tensor) -> Tensor:
    """Tiles of int8 weights with their scales, uint8, shape (N / 32, K / 32, 32 * 32 + 64); padding is zero weights.

    A group with a weight that is not finite gets a scale that is not a number, so that products with it show it.
    """
    weight = weight_NK.detach().float()
    weight = F.pad(weight, (0, -weight.shape[1] % GROUP, 0, -weight.shape[0] % TILE))
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=-1) / 127).bfloat16()
    is_usable = (scales > 0) & scales.isfinite()
    inverse = torch.where(is_usable, 1 / scales.float(), 0)[..., None]
    rounded = torch.where(is_usable[..., None], (groups * inverse).round().clamp(-127, 127), 0)
    scales = torch.where(groups.isfinite().all(dim=-1), scales, torch.nan)
    shifted = (rounded + 128).to(torch.uint8).view(-1, TILE, groups.shape[1], GROUP // 4, 4)
    tiles = shifted.permute(0, 2, 3, 1, 4).reshape(-1, groups.shape[1], TILE * GROUP)
    tile_scales = scales.view(-1, TILE, groups.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat((tiles, tile_scales), dim=-1)


def unpack_matrix(tiles: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """The weights that packed tiles stand for, fp32, shape (N, K)."""
    scales = tiles[..., TILE * GROUP :].contiguous().view(torch.bfloat16).float().transpose(1, 2)
    values = tiles[..., : TILE * GROUP].view(*tiles.shape[:2], GROUP // 4, TILE, 4).permute(0, 3, 1, 2, 4)
    weight = (values.reshape(-1, tiles.shape[1], GROUP).float() - 128) * scales.reshape(-1, tiles.shape[1], 1)
    return weight.flatten(1)[:num_outputs, :num_inputs]


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows (or entries) of gate and up in turns of 16, so that one tile holds both factors of 16 products."""
    half = TILE // 2
    widen = (0, 0) * (gate.ndim - 1) + (0, -gate.shape[0] % TILE)
    pairs = [F.pad(part, widen).reshape(-1, half, *part.shape[1:]) for part in (gate, up)]
    return torch.cat(pairs, dim=1).flatten(0, 1)


def pad_vector(vector: Tensor, *, step: int = TILE) -> Tensor:
    """fp32, padded with zeros to a multiple of `step`, its own memory."""
    return F.pad(vector.detach().float(), (0, -vector.shape[0] % step)).contiguous().clone()


@dataclass
class Arena:
    """Packed weights in one piece of memory.

    Attributes:
        parts: packed matrices until `close` moves them.
        kept: other arrays that C code points at.
        num_bytes: of all packed matrices, once closed.
    """

    parts: list[tuple[Matrix, Tensor]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, weight_NK: Tensor, bias_N: Tensor | None, up_NR: Tensor | None = None) -> Matrix:
        """Pack a matrix, with an adapter's up matrix as further inputs; its address is set by `close`."""
        tiles = pack_matrix(weight_NK)
        matrix = Matrix(num_tiles=tiles.shape[0], num_groups=tiles.shape[1])
        if up_NR is not None:
            extra = pack_matrix(F.pad(up_NR, (0, -up_NR.shape[1] % TILE)))
            matrix.num_extra = extra.shape[1]
            tiles = torch.cat((tiles, extra), dim=1)
        if bias_N is not None:
            matrix.bias = self.keep(pad_vector(bias_N))
        self.parts.append((matrix, tiles))
        return matrix

    def keep(self, array: Tensor) -> int:
        """The address of an array that lives as long as the arena."""
        self.kept.append(array)
        return array.data_ptr()

    def close(self) -> None:
        """Move all packed matrices into one piece and set their addresses."""
        self.num_bytes = sum(tiles.numel() for _, tiles in self.parts)
        # Memory in large pages where the system has them: the weights are read from end to end in every pass.
        memory = mmap.mmap(-1, max(self.num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        offset = 0
        for matrix, tiles in self.parts:
            whole[offset : offset + tiles.numel()] = tiles.flatten()
            matrix.tiles = whole.data_ptr() + offset
            offset += tiles.numel()
        self.kept.append(whole)
        self.parts = []


def linear_parts(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Several maps of one input as one: weights and biases one after the other."""
    weight = torch.cat([linear.weight.detach().float() for linear in linears])
    if linears[0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias.detach().float() for linear in linears])


def update_parts(
    adapter: GatedAdapter | None, names: Sequence[str], sizes: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """An adapter's updates of several maps of one input as one: down (R, K) and up (N, R), its scale in the latter.

    Args:
        names: of the maps; None where the adapter touches none of them.
        sizes: their outputs.
    """
    if adapter is None or not any(name in adapter.pairs for name in names):
        return None
    pairs = [adapter.pairs.get(name) for name in names]
    down_RK = torch.cat([pair.down_RE.detach().float() for pair in pairs if pair is not None])
    up_NR, row, column = torch.zeros(sum(sizes), len(down_RK)), 0, 0
    for pair, size in zip(pairs, sizes, strict=True):
        if pair is not None:
            rank = len(pair.down_RE)
            up_NR[row : row + size, column : column + rank] = pair.up_FR.detach().float() * adapter.scale
            column += rank
        row += size
    return down_RK, up_NR
