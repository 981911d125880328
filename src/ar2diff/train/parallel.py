"""Data-parallel training over several processes: FSDP2 put on a single-device decoder from outside.

Each rank takes its share of the micro-batches of a global batch. Losses are normalised by the counts of the whole
batch before any backward pass and gradients are summed, so the step does not depend on the number of ranks. A frozen
base under an adapter is not sharded: only the adapter's gradients travel. FSDP: Zhao et al., 2023.

Checkpoints are gathered and written by rank 0 in the one format that everything else reads.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ar2diff.errors import ConfigError, TrainingError
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import build_decoder

Item = TypeVar("Item")


class Ranks:
    """The processes of one job; a job of one needs nothing of torch.distributed.

    Attributes:
        rank, count: this process among them.
    """

    def __init__(self, rank: int = 0, count: int = 1, device_type: str = "cpu") -> None:
        self.rank, self.count = rank, count
        self._device_type = device_type
        self._mesh: Any = init_device_mesh(device_type, (count,)) if count > 1 else None

    @classmethod
    def join(cls, device_type: str) -> "Ranks":
        """Join the job that `torchrun` has started: gloo between CPUs, nccl between GPUs, each rank with one."""
        # Counts and decisions are shared as CPU tensors, gradients where they are.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
        if device_type == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        return cls(dist.get_rank(), dist.get_world_size(), device_type)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files, ledger and progress."""
        return self.rank == 0

    def leave(self) -> None:
        """Leave the job."""
        if self.count > 1:
            dist.destroy_process_group()

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.count > 1:
            dist.barrier()

    @contextmanager
    def named_loss(self) -> Iterator[None]:
        """What the other ranks' end looks like from here, said in words.

        Raises:
            TrainingError: the exchange with another rank failed.
        """
        try:
            yield
        except RuntimeError as error:
            if self.count == 1:
                raise
            raise TrainingError(
                "the exchange with another rank failed: it is gone, or stopped with an error of its own",
                given=f"rank {self.rank} of {self.count}: {error}",
                fix="Look at the other ranks' messages, then go on with --init and the last checkpoint",
            ) from error

    def load_device(self, device: str, *, is_frozen: bool) -> str:
        """Where a rank loads the base: a model to be sharded on the CPU, since no device may hold it whole."""
        return device if self.count == 1 or is_frozen else "cpu"

    def check(self, accum: int) -> None:
        """Refuse a number of micro-batches that the ranks cannot share.

        Raises:
            ConfigError: see above.
        """
        if accum % self.count:
            raise ConfigError("accum must be a multiple of the number of ranks", given=f"{accum} and {self.count}")

    def share(self, batches: Sequence[Item]) -> Sequence[Item]:
        """The micro-batches that this rank computes."""
        return batches[self.rank :: self.count]

    def shard(self, decoder: Decoder) -> None:
        """Shard the decoder's layers, one at a time, and bring all of it to the job's device.

        A frozen base under an adapter stays whole, where it is.
        """
        if self.count == 1 or decoder.adapter is not None:
            return
        for layer in decoder.layers:
            sharded = fully_shard(layer, mesh=self._mesh)
            # Sums, not means: losses are divided by the global batch's counts already.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        decoder.to(self._device_type)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def first_value(self, value: float) -> float:
        """Rank 0's value, for decisions that all ranks must take alike."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, src=0)
        return float(shared)

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Sum the gradients of whole parameters over the ranks, then clip all by their common norm.

        Returns:
            The norm before clipping.
        """
        parameters = list(parameters)
        if self.count == 1:
            return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
        shards, wholes = [], []
        for parameter in parameters:
            if parameter.grad is None:
                # A rank whose share masks nothing still takes part in the sums.
                parameter.grad = torch.zeros_like(parameter)
            if isinstance(parameter.grad, DTensor):
                shards.append(parameter.grad.to_local())
            else:
                wholes.append(self.sum(parameter.grad))
        square = self.sum(_square_sum(shards)) + _square_sum(wholes)
        norm = float(square.sqrt())
        if norm > max_norm:
            for grad in (*shards, *wholes):
                grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors whole, on rank 0 and there on the CPU; every rank must call it, and the others get none.

        One tensor is whole on the devices at a time.
        """
        gathered = {}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.is_first:
                gathered[name] = whole.cpu()
        return gathered

    def gather_decoder(self, decoder: Decoder) -> Decoder:
        """The decoder with whole weights on rank 0, the others' own shards there; every rank must call it."""
        if self.count == 1 or decoder.adapter is not None:
            return decoder
        tensors = self.gather(decoder.state_dict())
        return build_decoder(decoder.config, tensors) if self.is_first else decoder


@torch.no_grad()
def copy_whole(into: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    if isinstance(into, DTensor):
        into.copy_(distribute_tensor(whole.to(into.device), into.device_mesh, into.placements))
    else:
        into.copy_(whole)


def like(parameter: Tensor, whole: Tensor) -> Tensor:
    """A copy of a whole tensor, sharded as the parameter is; scalars stay whole."""
    copied = whole.to(parameter.device, copy=True)
    if isinstance(parameter, DTensor) and whole.ndim:
        return distribute_tensor(copied, parameter.device_mesh, parameter.placements)
    return copied


def _square_sum(tensors: Sequence[Tensor]) -> Tensor:
    return sum((t.square().sum(dtype=torch.float64) for t in tensors), torch.zeros((), dtype=torch.float64))
