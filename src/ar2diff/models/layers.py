"""The parts of a decoder: norm, rotary positions, attention projections, MLP.

Shape letters: B batch, L sequence, H query heads, K kv heads, D head dim, E model dim.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ar2diff.models.config import DecoderConfig, RopeScaling

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Attend(Protocol):
    """Attention over whatever keys the caller keeps: it owns the mask, the cache and grouped queries.

    Queries and keys come with rotary positions and norms applied; softmax uses the config's scale.
    """

    def __call__(self, layer_idx: int, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        """The attended values, shape (B, L, H, D)."""
        ...


# Runs a function of tensors; what it keeps for the backward pass is its own business.
Rerun = Callable[..., Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset), computed in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size) - offset)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; dtype is kept."""
        weight = self.weight if self.offset == 0.0 else self.weight.float() + self.offset
        if self.offset == 0.0 and x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        wide = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps)
        return (wide * weight.float()).to(x.dtype) if self.offset else wide.to(x.dtype) * weight


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Inverse frequencies, fp32, shape (D / 2,); Llama-3 scaling as in its release notes."""
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling is None:
        return inverse
    wavelength = 2 * math.pi / inverse
    low = scaling.original_max_seq_len / scaling.low_freq_factor
    high = scaling.original_max_seq_len / scaling.high_freq_factor
    blend = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * inverse / scaling.factor + blend * inverse
    stretched = torch.where(wavelength > low, inverse / scaling.factor, inverse)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, stretched)


def rope_tables(position_ids_BL: Tensor, inverse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of shape (B, L, 1, D), halves repeated (the layout that rotates first half against second)."""
    angles = position_ids_BL[..., None].float() * inverse
    doubled = torch.cat((angles, angles), dim=-1)[:, :, None, :]
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


def rotate(x_BLHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (Su et al., 2021) in the half-split layout."""
    first, second = x_BLHD.chunk(2, dim=-1)
    return x_BLHD * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Projections and position handling of one layer; the attention itself is the caller's `Attend`."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim, self.qk_norm = config.head_dim, config.qk_norm
        self.rotary = config.rope_layers is None or config.rope_layers[layer_idx]
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.output_bias)
        if config.qk_norm is not None:
            q_norm, k_norm = (config.head_dim,) * 2 if config.qk_norm == "head" else (q_size, kv_size)
            self.q_norm = RMSNorm(q_norm, config.norm_eps, config.norm_offset)
            self.k_norm = RMSNorm(k_norm, config.norm_eps, config.norm_offset)

    def forward(self, x_BLE: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The attention sublayer's output, shape (B, L, E)."""
        q, k, v = self.q_proj(x_BLE), self.k_proj(x_BLE), self.v_proj(x_BLE)
        if self.qk_norm == "flat":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out: Tensor = self.o_proj(attend(self.layer_idx, q, k, v).flatten(-2))
        return out


class MLP(nn.Module):
    """Gated feed-forward: down(act(gate(x)) * up(x)).

    Attributes:
        rerun: runs a function so that a backward pass computes its inner values again; None keeps them.
    """

    rerun: Rerun | None = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_BLE: Tensor) -> Tensor:
        """The MLP sublayer's output, shape (B, L, E)."""
        gate, up = self.gate_proj(x_BLE), self.up_proj(x_BLE)
        if self.rerun is None or not torch.is_grad_enabled():
            return self._join(gate, up)
        return self.rerun(self._join, gate, up)

    def _join(self, gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(gate) * up)
        return out
