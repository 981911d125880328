"""The decoder as decoding runs it: the same numbers as `models/decoder.py` with fewer, wider matrix products.

Weights are copied once into an inference form (q, k, v in one matrix, gate and up in one); rotary tables are kept.
The slow twin is `models/decoder.py`; a test equates them for every switch of `DecoderConfig`.
Shape letters: L new tokens, N chosen rows, H query heads, K kv heads, D head dim, E model dim, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ar2diff.errors import UnsupportedModelError
from ar2diff.models.decoder import Decoder, DecoderLayer
from ar2diff.models.layers import ACTIVATIONS, Attend, RMSNorm, rope_tables

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's maps; an absent norm is None."""

    attention_in: Map | None
    attention_out: Map | None
    mlp_in: Map | None
    mlp_out: Map | None
    q_norm: Map | None
    k_norm: Map | None
    qkv: Map
    output: Map
    gate_up: Map
    down: Map
    rotary: bool


class Runner(nn.Module):
    """Forward passes for one sequence; a module, so that a forward hook can count them.

    Args:
        decoder: the weights; later changes to them are not seen.

    Raises:
        UnsupportedModelError: the decoder has a mask-gated adapter.
    """

    rows_are_independent: ClassVar[bool] = False

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        if decoder.adapter is not None:
            # Its weights are copied without their adapter: the answer would be the parent's.
            raise UnsupportedModelError("decoding does not run mask-gated adapters", fix="Merge the adapter first")
        self.config = decoder.config
        self.dtype, self.device = decoder.embedding.weight.dtype, decoder.embedding.weight.device
        self._embedding = decoder.embedding.weight.detach()
        self._head = decoder.head_weight.detach()
        self._embedding_scale = torch.tensor(decoder.config.embedding_scale, dtype=self.dtype, device=self.device)
        self._final_norm = _build_norm(decoder.final_norm)
        self._activation = ACTIVATIONS[decoder.config.activation]
        self._layers = [_build_layer(cast(DecoderLayer, layer)) for layer in decoder.layers]
        self._inverse = decoder.inverse_frequencies
        self._cos = self._sin = torch.empty(0)

    def forward(self, ids_L: Tensor, positions_L: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, shape (L, E)."""
        x = F.embedding(ids_L, self._embedding)
        if self.config.embedding_scale != 1.0:
            x = x * self._embedding_scale
        cos, sin = self._cos[positions_L], self._sin[positions_L]
        for idx, layer in enumerate(self._layers):
            x = self._run_layer(idx, layer, x, cos, sin, attend)
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

    def _run_layer(self, idx: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self._project(layer, _apply(layer.attention_in, x), cos, sin)
        attended = attend(idx, q[None], k[None], v[None])
        x = self._add(x, _apply(layer.attention_out, layer.output(attended.reshape(x.shape[0], -1))))
        gate, up = layer.gate_up(_apply(layer.mlp_in, x)).chunk(2, dim=-1)
        return self._add(x, _apply(layer.mlp_out, layer.down(self._activation(gate) * up)))

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = layer.qkv(x)
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


def _build_layer(layer: DecoderLayer) -> _Layer:
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
        qkv=_build_linear(attention.q_proj, attention.k_proj, attention.v_proj),
        output=_build_linear(attention.o_proj),
        gate_up=_build_linear(mlp.gate_proj, mlp.up_proj),
        down=_build_linear(mlp.down_proj),
        rotary=attention.rotary,
    )


def _build_linear(*parts: nn.Linear) -> Map:
    weight = torch.cat([part.weight.detach() for part in parts]) if len(parts) > 1 else parts[0].weight.detach()
    bias = torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
    return lambda x: F.linear(x, weight, bias)


def _build_norm(norm: RMSNorm) -> Map:
    weight, size, eps = norm.weight.detach(), (norm.weight.shape[0],), norm.eps
    if norm.offset:
        wide_weight = weight.float() + norm.offset
        return lambda x: (F.rms_norm(x.float(), size, None, eps) * wide_weight).to(x.dtype)
    if weight.dtype == torch.float32:
        return lambda x: F.rms_norm(x, size, weight, eps)
    return lambda x: F.rms_norm(x.float(), size, None, eps).to(weight.dtype) * weight
