"""One checkpoint of a run, written by one process or by all ranks of a job."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ar2diff.files import PARTIAL_MARK
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.loading import LoadedModel, named_tensors, save_model
from ar2diff.train.checkpoint import TrainingState, checkpoint_dir, prune_checkpoints, write_checkpoint
from ar2diff.train.parallel import Ranks
from ar2diff.train.sharded import write_joined


def save_step(
    out_dir: Path,
    loaded: LoadedModel,
    diffusion: DiffusionConfig,
    moments: Mapping[str, Tensor],
    state: TrainingState,
    *,
    keep_last: int,
    ranks: Ranks,
) -> tuple[Path, str]:
    """Write the checkpoint of a step, delete older ones beyond `keep_last`; every rank must call it.

    Args:
        moments: the optimizer's tensors; like the decoder's, whole or this rank's parts.

    Returns:
        The folder, and the model's tensor root, which rank 0 alone knows: "" on the others.

    Raises:
        SpaceError: a disk is full; the older checkpoints stay.
        TrainingError: another rank could not write its parts.
    """
    folder = checkpoint_dir(out_dir, state.step)
    parts = folder.with_name(f"{folder.name}{PARTIAL_MARK}parts")
    weights: Path | None = None
    optimizer: Mapping[str, Tensor] | Path = moments
    if ranks.is_sharded(loaded.decoder):
        weights = write_joined(named_tensors(loaded.decoder, loaded.hf_config), parts / "weights", ranks)
        optimizer = write_joined(moments, parts / "optimizer", ranks)
    root = ""
    if ranks.is_first:
        root = write_checkpoint(
            folder,
            write_model=lambda into: save_model(into, loaded, diffusion, weights=weights),
            optimizer=optimizer,
            state=state,
        )
        shutil.rmtree(parts, ignore_errors=True)
        prune_checkpoints(out_dir, keep_last, up_to=state.step)
    ranks.wait()
    return folder, root
