"""What a run takes over from a checkpoint, and what its live weights are: whole in one process, in parts on ranks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ar2diff.errors import CheckpointError
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import load_model, named_tensors, root_of_decoder
from ar2diff.train.optim import optimizer_tensors, prepare_optimizer, restore_optimizer
from ar2diff.train.parallel import Ranks
from ar2diff.train.sharded import read_parts, root_of_parts


def root_of_live(decoder: Decoder, hf_config: dict[str, Any], ranks: Ranks) -> str:
    """The tensor root of the live weights; every rank must call it."""
    if ranks.is_sharded(decoder):
        return root_of_parts(named_tensors(decoder, hf_config))
    return root_of_decoder(decoder, hf_config)


def restore(
    init: Path,
    decoder: Decoder,
    hf_config: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    named: dict[str, nn.Parameter],
    *,
    moments: dict[str, Tensor] | None,
    ranks: Ranks,
) -> None:
    """Put a checkpoint's weights, and its optimizer's moments, into live ones.

    Args:
        moments: the optimizer's tensors; None where the run had not taken a step.

    Raises:
        CheckpointError: its tensors are not this run's.
    """
    if ranks.is_sharded(decoder):
        if moments is not None:
            prepare_optimizer(optimizer, named)
        read_parts({**named_tensors(decoder, hf_config), **optimizer_tensors(optimizer, named)}, init)
        return
    stored = load_model(init, dtype=torch.float32).decoder
    try:
        decoder.load_state_dict(stored.state_dict())
        if decoder.adapter is not None and stored.adapter is not None:
            decoder.adapter.load(stored.adapter)
        if moments is not None:
            restore_optimizer(optimizer, named, moments)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint does not fit this run: {error}", given=str(init)) from None
