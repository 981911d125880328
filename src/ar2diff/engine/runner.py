"""The decoder as decoding runs it: the same numbers as `models/decoder.py` with fewer, wider matrix products.

Weights are copied once into an inference form (q, k, v in one matrix, gate and up in one); rotary tables are kept.
The slow twin is `models/decoder.py`; a test equates them for every switch of `DecoderConfig`. A mask-gated adapter
adds its updates at the rows that the caller gates, and only there.
Shape letters: L new tokens, N chosen rows, H query heads, K kv heads, D head dim, E model dim, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ar2diff.models.adapters import GatedAdapter
from ar2diff.models.decoder import Decoder, DecoderLayer
from ar2diff.models.layers import ACTIVATIONS, Attend, RMSNorm, rope_tables

Map = Callable[[Tensor], Tensor]


class Linear(Protocol):
    """One linear map, or several of one input side by side, with an adapter's updates at some rows."""

    def __call__(self, x_LE: Tensor, gated_N: Tensor | None) -> Tensor:
        """The outputs, shape (L, F); `gated_N` holds the rows that get the updates."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's maps; an absent norm is None."""

    attention_in: Map | None
    attention_out: Map | None
    mlp_in: Map | None
    mlp_out: Map | None
    q_norm: Map | None
    k_norm: Map | None
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    rotary: bool


class Runner(nn.Module):
    """Forward passes for one sequence; a module, so that a forward hook can count them.

    Args:
        decoder: the weights, a mask-gated adapter's included; later changes to them are not seen.

    Attributes:
        has_gate: whether rows of noisy blocks must be gated: the decoder has a mask-gated adapter.
    """

    rows_are_independent: ClassVar[bool] = False

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.has_gate = decoder.adapter is not None
        self.config = decoder.config
        self.dtype, self.device = decoder.embedding.weight.dtype, decoder.embedding.weight.device
        self._embedding = decoder.embedding.weight.detach()
        self._head = decoder.head_weight.detach()
        self._embedding_scale = torch.tensor(decoder.config.embedding_scale, dtype=self.dtype, device=self.device)
        self._final_norm = _build_norm(decoder.final_norm)
        self._activation = ACTIVATIONS[decoder.config.activation]
        self._layers = [
            _build_layer(cast(DecoderLayer, layer), f"layers.{idx}", decoder.adapter)
            for idx, layer in enumerate(decoder.layers)
        ]
        self._inverse = decoder.inverse_frequencies
        self._cos = self._sin = torch.empty(0)

    def forward(self, ids_L: Tensor, positions_L: Tensor, attend: Attend, gate_L: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, shape (L, E).

        Args:
            gate_L: True at the rows of noisy blocks, which get the adapter's updates; all other rows are the base's.
        """
        gated_N = gate_L.nonzero()[:, 0] if gate_L is not None and self.has_gate else None
        x = F.embedding(ids_L, self._embedding)
        if self.config.embedding_scale != 1.0:
            x = x * self._embedding_scale
        cos, sin = self._cos[positions_L], self._sin[positions_L]
        for idx, layer in enumerate(self._layers):
            q, k, v = self._project(layer, _apply(layer.attention_in, x), cos, sin, gated_N)
            x = self._finish_layer(layer, x, attend(idx, q[None], k[None], v[None])[0], gated_N)
        return self._final_norm(x)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits in fp32, shape (N, V)."""
        logits = F.linear(hidden_NE, self._head).float()
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def reserve(self, num_positions: int) -> None:
        """Have rotary tables for positions 0 .. num_positions - 1 ready."""
        if num_positions <= self._cos.shape[0]:
            return
        positions = torch.arange(num_positions, device=self.device)[None]
        cos, sin = rope_tables(positions, self._inverse, self.dtype)
        half = sin.shape[-1] // 2
        # The sign of the rotation sits in the table: halves are swapped, not negated, in every layer.
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        self._cos, self._sin = cos[0].contiguous(), signed[0].contiguous()

    def _finish_layer(self, layer: _Layer, x: Tensor, attended: Tensor, gated_N: Tensor | None) -> Tensor:
        output = layer.output(attended.reshape(x.shape[0], -1), gated_N)
        x = self._add(x, _apply(layer.attention_out, output))
        gate, up = layer.gate_up(_apply(layer.mlp_in, x), gated_N).chunk(2, dim=-1)
        return self._add(x, _apply(layer.mlp_out, layer.down(self._activation(gate) * up, gated_N)))

    def _project(
        self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, gated_N: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(x, gated_N)
        if self.config.qk_norm == "flat":
            q, k, v = torch.split(qkv, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
            qkv = torch.cat((_apply(layer.q_norm, q), _apply(layer.k_norm, k), v), dim=-1)
        split = qkv.view(x.shape[0], heads + 2 * kv_heads, head_dim)
        qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
        if self.config.qk_norm == "head":
            qk = torch.cat((_apply(layer.q_norm, qk[:, :heads]), _apply(layer.k_norm, qk[:, heads:])), dim=1)
        if layer.rotary:
            first, second = qk.chunk(2, dim=-1)
            qk = qk * cos + torch.cat((second, first), dim=-1) * sin
        return qk[:, :heads], qk[:, heads:], v

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        scale = self.config.residual_scale
        return x + branch if scale == 1.0 else x + branch * scale


def _apply(norm: Map | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _build_layer(layer: DecoderLayer, name: str, adapter: GatedAdapter | None) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    norms = {
        place: _build_norm(cast(RMSNorm, layer._modules[f"{place}_norm"]))
        if f"{place}_norm" in layer._modules
        else None
        for place in ("attention_in", "attention_out", "mlp_in", "mlp_out")
    }

    return _Layer(
        **norms,
        q_norm=_build_norm(attention.q_norm) if attention.qk_norm else None,
        k_norm=_build_norm(attention.k_norm) if attention.qk_norm else None,
        qkv=_build_linear(attention, f"{name}.attention", ("q_proj", "k_proj", "v_proj"), adapter),
        output=_build_linear(attention, f"{name}.attention", ("o_proj",), adapter),
        gate_up=_build_linear(mlp, f"{name}.mlp", ("gate_proj", "up_proj"), adapter),
        down=_build_linear(mlp, f"{name}.mlp", ("down_proj",), adapter),
        rotary=attention.rotary,
    )


def _build_linear(owner: nn.Module, prefix: str, names: tuple[str, ...], adapter: GatedAdapter | None) -> Linear:
    parts = [cast(nn.Linear, owner.get_submodule(name)) for name in names]
    weight = torch.cat([part.weight.detach() for part in parts]) if len(parts) > 1 else parts[0].weight.detach()
    bias = torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
    sizes = [part.out_features for part in parts]

    def multiply(x_LE: Tensor, gated_N: Tensor | None) -> Tensor:
        out_LF = F.linear(x_LE, weight, bias)
        if adapter is None or gated_N is None:
            return out_LF
        chosen_NE = x_LE[gated_N]
        updated = [
            adapter.added(f"{prefix}.{name}", chosen_NE, part_NF) if f"{prefix}.{name}" in adapter.pairs else part_NF
            for name, part_NF in zip(names, torch.split(out_LF[gated_N], sizes, dim=-1), strict=True)
        ]
        return out_LF.index_copy_(0, gated_N, torch.cat(updated, dim=-1))

    return multiply


def _build_norm(norm: RMSNorm) -> Map:
    weight, size, eps = norm.weight.detach(), (norm.weight.shape[0],), norm.eps
    if norm.offset:
        wide_weight = weight.float() + norm.offset
        return lambda x: (F.rms_norm(x.float(), size, None, eps) * wide_weight).to(x.dtype)
    if weight.dtype == torch.float32:
        return lambda x: F.rms_norm(x, size, weight, eps)
    return lambda x: F.rms_norm(x.float(), size, None, eps).to(weight.dtype) * weight
