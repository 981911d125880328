"""The mean of several checkpoints of one run: often better than the last one where the learning rate never fell."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ar2diff.hashing import sha256_file
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import load_model, save_model


@torch.no_grad()
def average_checkpoints(checkpoints: Sequence[Path], folder: Path) -> str:
    """Write the mean of the models' weights as a model folder; returns its tensor root.

    Args:
        checkpoints: at least one, all of one run; the last one's settings count.
    """
    loaded = load_model(checkpoints[-1], dtype=torch.float32)
    mean = _weights(loaded.decoder)
    for count, checkpoint in enumerate(checkpoints[:-1], start=2):
        other = _weights(load_model(checkpoint, dtype=torch.float32).decoder)
        for name, tensor in mean.items():
            tensor.add_(other[name] - tensor, alpha=1 / count)
    return save_model(folder, loaded, loaded.diffusion)


def _weights(decoder: Decoder) -> dict[str, Tensor]:
    # An adapter's matrices are not in the decoder's own state.
    return {**decoder.state_dict(), **({} if decoder.adapter is None else decoder.adapter.parameters())}


def write_average(folder: Path, checkpoints: Sequence[Path]) -> dict[str, Any]:
    """Write the averaged model; its root, the checkpoints' names and every file's digest, for the ledger."""
    root = average_checkpoints(checkpoints, folder)
    files = {path.name: sha256_file(path) for path in sorted(folder.iterdir())}
    return {"tensor_root": root, "checkpoints": [path.name for path in checkpoints], "files": files}
