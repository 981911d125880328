"""What the backward pass computes again instead of keeping it in memory, and what is compiled.

Numbers do not change: the same operations run on the same inputs once more (activation checkpointing, Chen et al.,
2016). Put on a decoder from outside, like parallelism.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ar2diff.models.decoder import Decoder, DecoderLayer
from ar2diff.models.layers import RMSNorm

Recompute = Literal["none", "mlp", "layer"]


def set_recompute(decoder: Decoder, recompute: Recompute) -> None:
    """Have the decoder's layers run again in backward passes: whole, in their MLP's inner product, or not at all."""

    def run_again(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        adapter = decoder.adapter
        # The backward pass runs outside the block that set the gate.
        gate = False if adapter is None else adapter.gate

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), nullcontext() if adapter is None else adapter.gated(gate)

        out = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return cast(Tensor, out)

    for layer in cast("list[DecoderLayer]", decoder.layers):
        layer.rerun = run_again if recompute == "layer" else None
        layer.mlp.rerun = run_again if recompute == "mlp" else None


def compile_layers(decoder: Decoder, *, backend: str = "inductor") -> None:
    """Compile each layer's MLP and norms in place, for any sequence length; attention has kernels of its own.

    The compiler decides itself what an MLP's backward pass computes again.
    """
    for layer in cast("list[DecoderLayer]", decoder.layers):
        layer.mlp.rerun = None
        layer.mlp.compile(dynamic=True, backend=backend)
        for part in layer.children():
            if isinstance(part, RMSNorm):
                part.compile(dynamic=True, backend=backend)
