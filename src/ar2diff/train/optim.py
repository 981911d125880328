"""The optimizer: which weights are trained, AdamW, and the learning rate over the run.

Progress runs from 0 to 1 over the steps or over the time budget.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ar2diff.errors import ConfigError
from ar2diff.models.decoder import Decoder
from ar2diff.train.mask_row import MaskRow

LrSchedule = Literal["wsd", "cosine"]
MASK_ROW_NAME = "mask_row"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule.

    Attributes:
        lr: peak learning rate.
        schedule: "wsd" holds the peak and falls linearly over the last `decay_share`; "cosine" falls from the start.
        warmup_share, decay_share: shares of the run.
        final_lr_share: the last learning rate, as a share of the peak.
        clip_norm: bound on the gradient's norm.
        freeze_embeddings: keep embedding and head as they are, but for the mask row, which is always trained.
    """

    lr: float = 1e-4
    schedule: LrSchedule = "wsd"
    warmup_share: float = 0.05
    decay_share: float = 0.4
    final_lr_share: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    freeze_embeddings: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError("lr must be positive and finite", given=self.lr)
        if self.schedule not in ("wsd", "cosine"):
            raise ConfigError("the learning rate schedule is wsd or cosine", given=self.schedule)
        for name in ("warmup_share", "decay_share", "final_lr_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must lie in [0, 1]", given=getattr(self, name))
        if not self.clip_norm > 0:
            raise ConfigError("clip_norm must be positive", given=self.clip_norm)
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError("weight_decay must be finite and not negative", given=self.weight_decay)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("betas must lie in [0, 1)", given=self.betas)
        if not 0 <= self.eps < math.inf:
            raise ConfigError("eps must be finite and not negative", given=self.eps)


def learning_rate(config: OptimConfig, progress: float) -> float:
    """The rate of a step that ends at `progress`; the warm-up starts above 0, so that no step is lost."""
    warmup = max(progress / config.warmup_share, 0.1) if progress < config.warmup_share else 1.0
    low = config.final_lr_share
    if config.schedule == "cosine":
        share = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    elif config.decay_share and progress > 1 - config.decay_share:
        share = max(1 - (1 - low) * (progress - 1 + config.decay_share) / config.decay_share, low)
    else:
        share = 1.0
    return config.lr * min(warmup, share)


def trained_parameters(decoder: Decoder, mask_row: MaskRow | None) -> dict[str, nn.Parameter]:
    """Freeze what stays, and name what is trained.

    A mask row of its own means that the embeddings are frozen; an adapter, that all of the decoder is.
    """
    frozen = () if mask_row is None else ("embedding.", "head.")
    named = {}
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(decoder.adapter is None and not (frozen and name.startswith(frozen)))
        if parameter.requires_grad:
            named[name] = parameter
    if decoder.adapter is not None:
        named |= decoder.adapter.parameters()
    if mask_row is not None:
        named[MASK_ROW_NAME] = mask_row.row
    return named


def build_optimizer(named: dict[str, nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the named parameters, in their order; weight decay on matrices only."""
    groups = [
        {
            "params": [p for p in named.values() if (p.ndim >= 2, isinstance(p, DTensor)) == (is_matrix, is_sharded)],
            "weight_decay": config.weight_decay if is_matrix else 0.0,
        }
        # Sharded and whole parameters never share a group: the optimizer updates a group's tensors together.
        for is_matrix in (True, False)
        for is_sharded in (False, True)
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors: `<parameter>.<state>`; counts of steps have one element."""
    return {
        # Views of the state: filled in place where ranks read their own parts.
        f"{name}.{key}": value.view(1) if value.ndim == 0 else value
        for name, parameter in named.items()
        for key, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave.

    Raises:
        KeyError: a tensor is missing.
    """
    prepare_optimizer(optimizer, named)
    for name, tensor in optimizer_tensors(optimizer, named).items():
        tensor.copy_(tensors[name])


def prepare_optimizer(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> None:
    """Give the optimizer the state it has after a step, all zeros, to be filled from a checkpoint."""
    for parameter in named.values():
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = {"step": step, **moments}
