"""Tensors in parts on several ranks, to and from one safetensors file: torch's distributed checkpoints (DCP).

Every rank writes the parts it holds, all at once; rank 0 joins them on disk. No host ever holds the whole model. The
joined file is the one that a single process writes, so any number of ranks reads it. DCP's own metadata is a pickle:
the safetensors form of it is used, which has none. All ranks must see the same folder.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ar2diff.errors import Ar2diffError, CheckpointError, TrainingError
from ar2diff.files import fsync_file, space_error
from ar2diff.hashing import tensor_root
from ar2diff.models.roots import digest_tensor
from ar2diff.train.parallel import Ranks


def write_joined(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> Path:
    """Write tensors, sharded or whole, into one file of a folder that did not exist; every rank must call it.

    Returns:
        The file, on disk on all ranks' return.

    Raises:
        SpaceError: a rank's disk is full.
        TrainingError: a rank could not write for another reason.
    """
    if ranks.is_first:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    ranks.wait()
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise _write_error(error, folder) from None
    (joined,) = (path for path in folder.glob("*.safetensors"))
    if ranks.is_first:
        shutil.rmtree(folder / "sharded")
        fsync_file(joined)
    ranks.wait()
    return joined


def read_parts(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill every tensor with the part that this rank holds, from the safetensors files of a folder.

    Raises:
        CheckpointError: a tensor is missing there, or of another shape.
    """
    try:
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise CheckpointError(
            f"the checkpoint does not fit this run: {_reasons(error)[0]}", given=str(folder)
        ) from None


def root_of_parts(tensors: Mapping[str, Tensor]) -> str:
    """The tensor root of tensors that may be sharded, one whole at a time; every rank must call it."""
    return tensor_root(
        digest_tensor(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in tensors.items()
    )


def _write_error(error: CheckpointException, folder: Path) -> Ar2diffError:
    # A full disk is worth more than the other ranks' reasons.
    reasons = _reasons(error)
    full = (space_error(reason, folder) for reason in reasons if isinstance(reason, OSError))
    failed = TrainingError(
        f"a checkpoint could not be written: {reasons[0]}",
        given=str(folder),
        fix="Give every rank the same folder, then go on with --init and the last checkpoint",
    )
    return next((found for found in full if found is not None), failed)


def _reasons(error: CheckpointException) -> list[BaseException]:
    return [reason for reason, _ in error.failures.values()] or [error]
