"""A mask-gated adapter: draft tokens in parallel with some megabytes of weights, the parent model untouched.

The base is frozen. Low-rank matrices (LoRA, Hu et al., 2021) are added to its linear layers at the positions that the
gate selects: those of noisy blocks (draft mode). Elsewhere, and wherever no gate is set, every linear layer returns
exactly what the parent's returns, so the clean stream is the parent bit for bit.

The seam for decoding. A decoder knows its adapter as `decoder.adapter`. Within `adapter.gated(gate_BL)` a forward
pass of `models/decoder.py` runs rows of masks and anchors in draft mode (True) and clean rows as the parent (False);
one pass may mix them. A runner with weights of its own form calls `adapter.added(name, x, out)` instead, and
keeps the result at gated rows and `out` elsewhere. Keys and values that a commit stores are those of
rows with the gate off.

Files follow PEFT: `adapter_model.safetensors` and `adapter_config.json`, whose `ar2diff` entry holds the gate rule.
PEFT has no gate: there the adapter is on everywhere, as in `merge_adapter`.

Shape letters: B batch, L sequence, E inputs of a layer, F its outputs, R rank.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ar2diff.errors import ConfigError
from ar2diff.models.decoder import Decoder
from ar2diff.seeding import keyed_generator

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GATE_RULE = "noisy"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A mask-gated adapter.

    Attributes:
        rank: of each layer's update.
        alpha: the update is scaled by alpha / rank.
        targets: linear layers that have one, by the last part of their name.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigError("an adapter's rank is a whole number, at least 1", given=self.rank)
        if not 0 < self.alpha < math.inf:
            raise ConfigError("an adapter's alpha must be positive and finite", given=self.alpha)
        if not self.targets or set(self.targets) - set(TARGETS) or len(set(self.targets)) < len(self.targets):
            raise ConfigError("an adapter's targets are linear layers", given=self.targets, fix=f"Use of {TARGETS}")


class LowRankPair(NamedTuple):
    """The matrices of one layer: its update is alpha / rank * up @ down."""

    down_RE: nn.Parameter
    up_FR: nn.Parameter


class GatedAdapter:
    """The adapter of one decoder, attached to it on construction and off until a gate is set.

    It lives beside the decoder's modules, so the decoder's own `state_dict` stays the parent's.

    Args:
        decoder: its linear layers get a forward pass that knows the gate; it must have no adapter yet.
        seed: of the down matrices; the up matrices are zero, so that a fresh adapter changes nothing.
    """

    def __init__(self, decoder: Decoder, config: AdapterConfig, *, mask_token_id: int, seed: int) -> None:
        assert decoder.adapter is None
        self.config, self.mask_token_id = config, mask_token_id
        self.scale = config.alpha / config.rank
        self.pairs: dict[str, LowRankPair] = {}
        self.gate: Tensor | bool = False
        for name, layer in decoder.named_modules():
            if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in config.targets:
                self.pairs[name] = _new_pair(layer, config.rank, seed, name)
                layer.forward = partial(self._forward, name, layer)  # type: ignore[method-assign]
        decoder.adapter = self

    @contextmanager
    def gated(self, gate: Tensor | bool) -> Iterator[None]:
        """Draft mode within the block.

        Args:
            gate: True for all positions, or a boolean (B, L) that selects some.
        """
        before, self.gate = self.gate, gate
        try:
            yield
        finally:
            self.gate = before

    def added(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """`out`, the output of layer `name` for inputs `x` of any leading shape, with the layer's update."""
        down_RE, up_FR = self.pairs[name]
        low = F.linear(x, down_RE.to(x.dtype)).flatten(0, -2) * self.scale
        # One pass over the output instead of three: the update is never a tensor of its own.
        return torch.addmm(out.flatten(0, -2), low.to(out.dtype), up_FR.to(out.dtype).t()).view_as(out)

    def parameters(self) -> dict[str, nn.Parameter]:
        """All matrices as `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, in the decoder's order."""
        named = {}
        for name, (down_RE, up_FR) in self.pairs.items():
            named[f"{name}.lora_A.weight"] = down_RE
            named[f"{name}.lora_B.weight"] = up_FR
        return named

    @torch.no_grad()
    def load(self, other: "GatedAdapter") -> None:
        """Take over the matrices of an adapter of the same shape.

        Raises:
            KeyError, RuntimeError: its shape is another.
        """
        theirs = other.parameters()
        for name, parameter in self.parameters().items():
            parameter.copy_(theirs[name])

    def _forward(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        if self.gate is True and not layer.weight.requires_grad:
            return self._adapted(name, layer, x)
        out = F.linear(x, layer.weight, layer.bias)
        if self.gate is False:
            return out
        changed = self.added(name, x, out)
        # Chosen, not multiplied by zero: an ungated row keeps every bit.
        return changed if self.gate is True else torch.where(self.gate[..., None], changed, out)

    def _adapted(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        device_type = x.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
        bias = None if layer.bias is None else layer.bias.to(dtype)
        pair = (matrix.to(dtype) for matrix in self.pairs[name])
        out: Tensor = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
            x.to(dtype).flatten(0, -2), layer.weight.to(dtype), bias, *pair, self.scale
        )
        return out.view(*x.shape[:-1], -1)


class _AdaptedLinear(torch.autograd.Function):
    """A frozen linear layer and its low-rank update in one: no tensor of the layer's size is made or kept twice."""

    @staticmethod
    def forward(
        ctx: Any, x_LE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, down_RE: Tensor, up_FR: Tensor, scale: float
    ) -> Tensor:
        """What `GatedAdapter.added` makes of the layer's output, shape (L, F)."""
        low_LR = F.linear(x_LE, down_RE) * scale
        ctx.save_for_backward(x_LE, weight_FE, down_RE, up_FR, low_LR)
        ctx.scale = scale
        return F.linear(x_LE, weight_FE, bias_F).addmm_(low_LR, up_FR.t())

    @staticmethod
    def backward(ctx: Any, grad_LF: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of the two small matrices."""
        x_LE, weight_FE, down_RE, up_FR, low_LR = ctx.saved_tensors
        slope_LR = (grad_LF @ up_FR).mul_(ctx.scale)
        grad_LE = (grad_LF @ weight_FE).addmm_(slope_LR, down_RE) if ctx.needs_input_grad[0] else None
        return grad_LE, None, None, slope_LR.t() @ x_LE, grad_LF.t() @ low_LR, None


@torch.no_grad()
def merge_adapter(decoder: Decoder) -> None:
    """Make the draft mode the only one: updates are added to the weights, and the decoder has no adapter any more.

    The result is a plain diffusion decoder; the parent is no longer in it.
    """
    adapter = decoder.adapter
    assert adapter is not None
    for name, (down_RE, up_FR) in adapter.pairs.items():
        layer = decoder.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        wide = layer.weight.float() + adapter.scale * (up_FR.float() @ down_RE.float())
        layer.weight.copy_(wide)
    detach_adapter(decoder)


def detach_adapter(decoder: Decoder) -> None:
    """Give the decoder back as the parent; the trained mask row stays in its embedding."""
    assert decoder.adapter is not None
    for name in decoder.adapter.pairs:
        del decoder.get_submodule(name).forward
    decoder.adapter = None


def _new_pair(layer: nn.Linear, rank: int, seed: int, name: str) -> LowRankPair:
    # Uniform in +-1 / sqrt(inputs), as linear layers are initialised.
    bound = layer.in_features**-0.5
    values = keyed_generator("adapter", seed, name).uniform(-bound, bound, (rank, layer.in_features))
    weight = layer.weight
    down = torch.from_numpy(values).to(device=weight.device, dtype=weight.dtype)
    up = torch.zeros(layer.out_features, rank, device=weight.device, dtype=weight.dtype)
    return LowRankPair(nn.Parameter(down), nn.Parameter(up))
