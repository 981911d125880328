"""The KV cache of one sequence: a fixed buffer, written once per committed token, read without copying.

Shape letters: B batch (1), M cached tokens, L new tokens, H query heads, K kv heads, D head dim.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ar2diff.errors import ContextOverflowError

# Keys are read in whole groups of this many. The fused kernel sums full vectors and the rest in another order, so
# without it a token's result would depend on how many tokens stand behind it in the same pass.
KEY_GROUP = 32


class KVCache:
    """Keys and values of a committed prefix, for all layers.

    A pass stages the keys and values of its tokens behind the prefix (`staged`), attends over prefix plus staged,
    and only `commit` makes staged tokens part of the prefix. Denoising passes never commit.
    """

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
        shape = (num_layers, 1, num_kv_heads, _round_up(capacity), head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)
        self.softmax_scale = softmax_scale
        self.capacity = capacity
        self.length = 0

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

    def open_places(self, count: int) -> tuple[Tensor, Tensor]:
        """All layers' keys and values in place, shape (layers, 1, K, capacity, D), with room for `count` new tokens.

        Raises:
            ContextOverflowError: prefix and new tokens exceed the capacity.
        """
        if (end := self.length + count) > self.capacity:
            raise ContextOverflowError("the KV cache is full", given=f"{end} tokens for {self.capacity} places")
        return self._k, self._v

    def write(self, layer_idx: int, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """Stage new keys and values; returns views (1, K, N, D) over prefix and staged.

        N is rounded up to `KEY_GROUP`: what lies behind the staged tokens is finite and must be masked out.

        Raises:
            ContextOverflowError: prefix and new tokens exceed the capacity.
        """
        end = self.length + k_BLKD.shape[1]
        keys, values = self.open_places(k_BLKD.shape[1])
        keys[layer_idx, :, :, self.length : end] = k_BLKD.transpose(1, 2)
        values[layer_idx, :, :, self.length : end] = v_BLKD.transpose(1, 2)
        return self._k[layer_idx, :, :, : _round_up(end)], self._v[layer_idx, :, :, : _round_up(end)]


class CacheAttend:
    """Attention of new tokens over a cache's prefix and themselves; see `KVCache.attend_with`.

    Valid until the cache's length changes. Grouped query heads are folded into the query rows, so that keys and
    values are read where they lie, once per kv head.

    Attributes:
        cache, mask_LL: for a forward pass that computes attention itself.
    """

    def __init__(self, cache: KVCache, mask_LL: Tensor | None) -> None:
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
            folded, keys, values, attn_mask=self._bias, scale=self.cache.softmax_scale
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


def _round_up(num_keys: int) -> int:
    return -(-num_keys // KEY_GROUP) * KEY_GROUP
