"""The KV cache: one store of pages for many sequences, written once per committed token.

A sequence whose pages lie side by side is read where it is; any other is gathered, layer by layer, except by a
forward pass that follows page tables itself.
Shape letters: B batch (1), M cached tokens, L new tokens, H query heads, K kv heads, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ar2diff.errors import ContextOverflowError

# Keys are read in whole groups of this many. The fused kernel sums full vectors and the rest in another order, so
# without it a token's result would depend on how many tokens stand behind it in the same pass.
KEY_GROUP = 32


class KVStore:
    """Keys and values of all layers, in pages of `page_size` tokens; memory is taken once.

    Attributes:
        keys, values: shape (layers, K, num_pages * page_size, D); always finite where no pass failed.

    Args:
        page_size: a multiple of `KEY_GROUP`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        softmax_scale: float,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert page_size % KEY_GROUP == 0
        shape = (num_layers, num_kv_heads, num_pages * page_size, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.softmax_scale = softmax_scale
        self.num_pages, self.page_size = num_pages, page_size

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def clear(self, page: int) -> None:
        """Zero a page: what is not finite there would spoil its next user, masked or not."""
        places = slice(page * self.page_size, (page + 1) * self.page_size)
        self.keys[:, :, places] = 0.0
        self.values[:, :, places] = 0.0


class PagedCache:
    """Keys and values of one sequence's committed prefix, in some pages of a store.

    A pass stages the keys and values of its tokens behind the prefix, attends over prefix plus staged, and only
    `commit` makes staged tokens part of the prefix. Denoising passes never commit.

    Attributes:
        pages: in the order of the tokens.
        table: the same as int64, for forward passes that follow it themselves.
        capacity, length: tokens that fit, and tokens that are committed.
    """

    def __init__(self, store: KVStore, pages: Sequence[int], *, length: int = 0) -> None:
        self.store, self.length = store, length
        self.pages: tuple[int, ...] = ()
        self.extend(pages)

    def extend(self, pages: Sequence[int]) -> None:
        """Add pages at the end."""
        size, device = self.store.page_size, self.store.keys.device
        self.pages += tuple(pages)
        self.capacity = len(self.pages) * size
        self.table = torch.tensor(self.pages, dtype=torch.int64)
        first = self.pages[0] if self.pages else 0
        self._start = first * size if self.pages == tuple(range(first, first + len(self.pages))) else None
        self._places = torch.empty(0)
        if self._start is None:
            offsets = torch.arange(size, device=device)
            self._places = (self.table.to(device)[:, None] * size + offsets).flatten()

    def commit(self, count: int) -> None:
        """Make the first `count` staged tokens part of the prefix."""
        assert 0 <= count <= self.capacity - self.length
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` committed tokens."""
        assert 0 <= length <= self.length
        self.length = length

    def attend_with(self, mask_LL: Tensor | None) -> "CacheAttend":
        """An `Attend` for L new tokens over the prefix and themselves.

        Args:
            mask_LL: boolean (L, L) among the new tokens; the prefix is always visible. None means bidirectional.
        """
        return CacheAttend(self, mask_LL)

    def check_room(self, count: int) -> None:
        """Refuse more new tokens than fit.

        Raises:
            ContextOverflowError: prefix and new tokens exceed the capacity.
        """
        if (end := self.length + count) > self.capacity:
            raise ContextOverflowError("the KV cache is full", given=f"{end} tokens for {self.capacity} places")

    def write(self, layer_idx: int, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """Stage new keys and values; returns (1, K, N, D) over prefix and staged.

        N is rounded up to `KEY_GROUP`: what lies behind the staged tokens is finite and must be masked out.

        Raises:
            ContextOverflowError: prefix and new tokens exceed the capacity.
        """
        self.check_room(k_BLKD.shape[1])
        keys, values = self.store.keys[layer_idx], self.store.values[layer_idx]
        start, end = self.length, self.length + k_BLKD.shape[1]
        if self._start is not None:
            keys[:, self._start + start : self._start + end] = k_BLKD[0].transpose(0, 1)
            values[:, self._start + start : self._start + end] = v_BLKD[0].transpose(0, 1)
            seen = slice(self._start, self._start + _round_up(end))
            return keys[None, :, seen], values[None, :, seen]
        keys.index_copy_(1, self._places[start:end], k_BLKD[0].transpose(0, 1))
        values.index_copy_(1, self._places[start:end], v_BLKD[0].transpose(0, 1))
        places = self._places[: _round_up(end)]
        return keys.index_select(1, places)[None], values.index_select(1, places)[None]


class KVCache(PagedCache):
    """The cache of one sequence alone, with a store of its own."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        softmax_scale: float,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_pages = -(-capacity // KEY_GROUP)
        store = KVStore(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            softmax_scale=softmax_scale,
            num_pages=num_pages,
            page_size=KEY_GROUP,
            dtype=dtype,
            device=device,
        )
        super().__init__(store, range(num_pages))
        self.capacity = capacity


class CacheAttend:
    """Attention of new tokens over a cache's prefix and themselves; see `PagedCache.attend_with`.

    Valid until the cache's length changes. Grouped query heads are folded into the query rows, so that keys and
    values are read where they lie, once per kv head.

    Attributes:
        cache, mask_LL: for a forward pass that computes attention itself.
    """

    def __init__(self, cache: PagedCache, mask_LL: Tensor | None) -> None:
        self.cache = cache
        self.mask_LL = mask_LL
        self._bias: Tensor | None = None

    def __call__(self, layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        """The attended values, shape (1, L, H, D)."""
        keys, values = self.cache.write(layer_idx, k_BLKD, v_BLKD)
        _, length, num_heads, head_dim = q_BLHD.shape
        num_kv_heads = keys.shape[1]
        groups = num_heads // num_kv_heads
        if self._bias is None:
            self._bias = self._build_bias(length, keys.shape[2], groups, q_BLHD)
        q = q_BLHD.view(length, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)
        folded = q.reshape(1, num_kv_heads, groups * length, head_dim)
        out = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=self._bias, scale=self.cache.store.softmax_scale
        )
        unfolded = out.view(num_kv_heads, groups, length, head_dim).permute(2, 0, 1, 3)
        return unfolded.reshape(1, length, num_heads, head_dim)

    def _build_bias(self, length: int, num_keys: int, groups: int, like: Tensor) -> Tensor:
        # The additive form, built once a pass: the kernel would turn a boolean mask into it in every layer. It is
        # there even where all is visible, because the kernel rounds differently without one.
        start = self.cache.length
        bias = torch.zeros(length, num_keys, dtype=like.dtype, device=like.device)
        bias[:, start + length :] = float("-inf")
        if self.mask_LL is not None:
            bias[:, start : start + length].masked_fill_(~self.mask_LL, float("-inf"))
        return bias.repeat(groups, 1)


class JoinedAttend:
    """Attention of one pass over several sequences: rows follow each other in the order of `parts`.

    Attributes:
        parts: for each sequence its number of rows and its own attention.
    """

    def __init__(self, parts: Sequence[tuple[int, CacheAttend]]) -> None:
        self.parts = tuple(parts)

    def __call__(self, layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        """The attended values, shape (1, L, H, D)."""
        attended, first = [], 0
        for length, attend in self.parts:
            rows = slice(first, first + length)
            attended.append(attend(layer_idx, q_BLHD[:, rows], k_BLKD[:, rows], v_BLKD[:, rows]))
            first += length
        return torch.cat(attended, dim=1)


def _round_up(num_keys: int) -> int:
    return -(-num_keys // KEY_GROUP) * KEY_GROUP
