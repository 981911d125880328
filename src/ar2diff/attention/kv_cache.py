"""The KV cache of one sequence: a fixed buffer, written once per committed token, read without copying.

Shape letters: B batch (1), M cached tokens, L new tokens, S block, K kv heads, D head dim.
"""

import torch
from torch import Tensor

from ar2diff.attention.ops import attend_sdpa
from ar2diff.errors import ContextOverflowError


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
        shape = (num_layers, 1, num_kv_heads, capacity, head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)
        self.softmax_scale = softmax_scale
        self.capacity = capacity
        self.length = 0

    def commit(self, count: int) -> None:
        """Make the first `count` staged tokens part of the prefix."""
        self.length += count
        assert self.length <= self.capacity

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` committed tokens."""
        assert 0 <= length <= self.length
        self.length = length

    def attend_with(self, mask_LM: Tensor | None) -> "CacheAttend":
        """An `Attend` for L new tokens over the prefix and themselves.

        Args:
            mask_LM: boolean (L, L) among the new tokens; the prefix is always visible. None means bidirectional.
        """
        return CacheAttend(self, mask_LM)

    def write(self, layer_idx: int, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """Stage new keys and values; returns views (1, M + L, K, D) over prefix and staged.

        Raises:
            ContextOverflowError: prefix and new tokens exceed the capacity.
        """
        end = self.length + k_BLKD.shape[1]
        if end > self.capacity:
            raise ContextOverflowError("the KV cache is full", given=f"{end} tokens for {self.capacity} places")
        self._k[layer_idx, :, :, self.length : end] = k_BLKD.transpose(1, 2)
        self._v[layer_idx, :, :, self.length : end] = v_BLKD.transpose(1, 2)
        keys, values = self._k[layer_idx, :, :, :end], self._v[layer_idx, :, :, :end]
        return keys.transpose(1, 2), values.transpose(1, 2)


class CacheAttend:
    """Attention of new tokens over a cache's prefix and themselves; see `KVCache.attend_with`."""

    def __init__(self, cache: KVCache, mask_LM: Tensor | None) -> None:
        self._cache = cache
        self._full_mask: Tensor | None = None
        if mask_LM is not None:
            prefix = mask_LM.new_ones(mask_LM.shape[0], cache.length)
            self._full_mask = torch.cat((prefix, mask_LM), dim=1)

    def __call__(self, layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        """The attended values, shape (1, L, H, D)."""
        keys, values = self._cache.write(layer_idx, k_BLKD, v_BLKD)
        return attend_sdpa(q_BLHD, keys, values, self._full_mask, self._cache.softmax_scale)
