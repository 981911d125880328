"""Tensors in parts on several ranks, to and from one safetensors file: torch's distributed checkpoints (DCP).

Every rank writes the parts it holds, all at once; rank 0 joins them on disk. No host ever holds the whole model. The
joined file holds what a single process writes, so any number of ranks reads it. DCP's own metadata is a pickle: the
safetensors form of it is used, which has none. All ranks must see the same folder.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ar2diff.errors import Ar2diffError, CheckpointError, TrainingError
from ar2diff.files import fsync_file, space_error
from ar2diff.hashing import tensor_root
from ar2diff.models.roots import digest_tensor
from ar2diff.train.parallel import Ranks

# A rank's host holds three copies of a part file while it writes it.
PART_BYTES = 10**9


class _PartWriter(HuggingFaceStorageWriter):
    # Parts in files of bounded size, joined into one.

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(str(folder), number_part_files(tensors), save_distributed=True, enable_consolidation=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.fqn_to_index_mapping = None
        super().finish(metadata, results)


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
    try:
        save(dict(tensors), storage_writer=_PartWriter(folder, tensors))
    except CheckpointException as error:
        raise _write_error(error, folder) from None
    (joined,) = (path for path in folder.glob("*.safetensors"))
    if ranks.is_first:
        shutil.rmtree(folder / "sharded")
        fsync_file(joined)
    ranks.wait()
    return joined


def number_part_files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The part file that each tensor goes into, from 1, alike on all ranks.

    A file takes tensors of at most `PART_BYTES`, counted whole, or a single larger one; a rank writes its share.
    """
    numbers, number, room = {}, 0, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if not number or size > room:
            number, room = number + 1, PART_BYTES
        numbers[name], room = number, room - size
    return numbers


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
