"""What a training run is told."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ar2diff.errors import ConfigError
from ar2diff.models.adapters import AdapterConfig
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.optim import OptimConfig
from ar2diff.train.recompute import Recompute
from ar2diff.train.step import Precision

# Far beyond any run; a larger number is a slip, found here instead of in the middle of an allocation.
MAX_COUNT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run.

    Attributes:
        steps: optimizer steps, or None where `minutes` bounds the run.
        minutes: time budget of the training loop; the learning rate follows the elapsed share of it. A run under a
            time budget is not repeatable bit for bit.
        micro: rows per micro-batch.
        accum: micro-batches per optimizer step.
        row_len: positions of a packed row.
        save_every: steps between checkpoints; None saves at the end alone.
        keep_last: checkpoints that are kept; older ones are deleted.
        average_last: also write the mean of the last so many checkpoints as OUT/averaged; 0 writes none.
        precision: "fp32", or "bf16" for matrix products in bf16 with fp32 weights.
        recompute: what the backward pass computes again instead of keeping it: "none", the product inside each MLP
            ("mlp": half of the memory, next to no time), or each whole layer ("layer": the least memory, a forward
            pass more). Losses and gradients are the same.
        compiled: run each layer's MLP and norms through torch.compile; pays on a GPU.
        fused_loss: the linear cross-entropy kernel of cut-cross-entropy in place of chunks, on CUDA with the extra
            `gpu`; where it cannot be used, chunks are, and the ledger says why.
        max_loss: a mean loss above so many nats a token ends the run as diverged; a blind guess costs about 12.
        seed: of row order, noise and a new adapter.
        adapter: train a mask-gated adapter on the frozen base instead of its weights; None trains the weights.
    """

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    steps: int | None = None
    minutes: float | None = None
    micro: int = 8
    accum: int = 1
    row_len: int = 512
    save_every: int | None = None
    keep_last: int = 3
    average_last: int = 0
    precision: Precision = "fp32"
    recompute: Recompute = "mlp"
    compiled: bool = False
    fused_loss: bool = False
    max_loss: float = 100.0
    seed: int = 0
    adapter: AdapterConfig | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("give either steps or minutes", given=f"steps {self.steps}, minutes {self.minutes}")
        if self.minutes is not None and not 0 < self.minutes <= MAX_COUNT:
            raise ConfigError(f"minutes must lie above 0 and be at most {MAX_COUNT}", given=self.minutes)
        for name in ("steps", "micro", "accum", "row_len", "save_every", "keep_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1", given=value)
            if value is not None and value > MAX_COUNT:
                raise ConfigError(f"{name} must be at most {MAX_COUNT}", given=value)
        # A run's settings are recorded as RFC 8785 JSON, whose integers end there.
        if abs(self.seed) >= 2**53:
            raise ConfigError("seed must lie within 53 bits", given=self.seed)
        if self.objective.block_sizes[-1] > self.row_len:
            raise ConfigError(
                "a block is longer than a row",
                given=f"block size {self.objective.block_sizes[-1]}, row_len {self.row_len}",
                fix="Raise row_len or choose a smaller block size",
            )
        if not 0 <= self.average_last <= self.keep_last:
            raise ConfigError("average_last lies between 0 and keep_last", given=self.average_last)
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError("precision is fp32 or bf16", given=self.precision)
        if self.recompute not in ("none", "mlp", "layer"):
            raise ConfigError("recompute is none, mlp or layer", given=self.recompute)
        if not self.max_loss > 0:
            raise ConfigError("max_loss must be positive", given=self.max_loss)
        if self.adapter is not None:
            self._check_frozen_base()

    def _check_frozen_base(self) -> None:
        if self.objective.clean_attention != "causal" or self.objective.ar_weight:
            raise ConfigError(
                "with an adapter the clean stream is the frozen parent: causal, and without a loss",
                given=f"clean_attention {self.objective.clean_attention}, ar_weight {self.objective.ar_weight}",
                fix="Set clean_attention to causal and ar_weight to 0",
            )
        if not self.optim.freeze_embeddings:
            raise ConfigError("an adapter leaves the embeddings frozen", fix="Set freeze_embeddings")
        if self.compiled:
            # torch.compile cannot trace the adapter's own autograd function.
            raise ConfigError("compiled layers do not go together with an adapter", fix="Leave one of them out")

    def as_json(self) -> dict[str, Any]:
        """The whole config as plain JSON values."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value
