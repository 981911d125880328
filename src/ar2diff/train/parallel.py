"""Training over several processes: FSDP2 and tensor parallelism put on a single-device decoder from outside.

Ranks form a grid, data by tensor. Ranks of one data index hold parts of the same matrices and compute the same share
of a global batch's micro-batches. Losses are normalised by the counts of the whole batch before any backward pass and
gradients are summed, so the step does not depend on the grid. A frozen base under an adapter is not sharded: only the
adapter's gradients travel. FSDP: Zhao et al., 2023. Tensor parallelism: Shoeybi et al., 2019.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ar2diff.errors import Ar2diffError, ConfigError, RankError, TrainingError
from ar2diff.models.config import DecoderConfig
from ar2diff.models.decoder import Decoder

Item = TypeVar("Item")
# Heads and the MLP's inner features are cut; one sum over the ranks ends each half of a layer.
CUT: dict[str, type[ParallelStyle]] = {
    "attention.q_proj": ColwiseParallel,
    "attention.k_proj": ColwiseParallel,
    "attention.v_proj": ColwiseParallel,
    "attention.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


class Ranks:
    """The processes of one job; a job of one needs nothing of torch.distributed.

    Attributes:
        rank, count: this process among them.
        tensor_parallel: how many ranks hold parts of one matrix.
    """

    def __init__(self, rank: int = 0, count: int = 1, device_type: str = "cpu", tensor_parallel: int = 1) -> None:
        self.rank, self.count, self.tensor_parallel = rank, count, tensor_parallel
        self._device_type = device_type
        self._mesh: Any = None
        # Weights whose gradients each tensor rank has a part of, that of its own heads.
        self._of_own_heads: list[nn.Parameter] = []

    @classmethod
    def join(cls, device_type: str, tensor_parallel: int = 1) -> "Ranks":
        """Join the job that `torchrun` has started: gloo between CPUs, nccl between GPUs, each rank with one.

        Raises:
            ConfigError: the number of ranks is no multiple of `tensor_parallel`; rank 0 alone says so.
        """
        # Counts and decisions are shared as CPU tensors, gradients where they are.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
        count = dist.get_world_size()
        ranks = cls(dist.get_rank(), count, device_type, tensor_parallel)
        with ranks.agreed():
            if tensor_parallel < 1 or count % tensor_parallel:
                raise ConfigError(
                    "the number of ranks must be a multiple of tensor_parallel",
                    given=f"{count} and {tensor_parallel}",
                )
        if device_type == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
        if count > 1:
            shape = (count // tensor_parallel, tensor_parallel)
            ranks._mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "tensor"))
        return ranks

    @property
    def is_first(self) -> bool:
        """Whether this process writes files, ledger and progress."""
        return self.rank == 0

    def leave(self) -> None:
        """Leave the job."""
        if self.count > 1:
            dist.destroy_process_group()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A part of the work that all ranks finish, or none goes on from; every rank must enter it.

        Without it a rank that refuses leaves the others waiting for it in their next exchange.

        Raises:
            RankError: another rank refused, and says why. Of several that do, the first.
        """
        refused: Exception | None = None
        try:
            yield
        except Exception as error:
            refused = error
        first = self._find_first(is_meant=refused is not None)
        # Our own mistakes keep their traceback on every rank.
        is_ours = refused is not None and not isinstance(refused, Ar2diffError | OSError)
        if refused is not None and (first == self.rank or is_ours):
            raise refused
        if first < self.count:
            raise RankError("another rank has refused", given=f"rank {first} of {self.count}") from refused

    def _find_first(self, *, is_meant: bool) -> int:
        # The lowest rank that is meant; `count` where none is.
        found = torch.tensor([self.rank if is_meant else self.count])
        if self.count > 1:
            with self.named_loss():
                dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

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
        shares = self.count // self.tensor_parallel
        if accum % shares:
            raise ConfigError("accum must be a multiple of the number of ranks", given=f"{accum} and {shares}")

    def check_model(self, config: DecoderConfig, *, is_frozen: bool) -> None:
        """Refuse a model whose matrices the tensor ranks cannot cut.

        Raises:
            ConfigError: it has an adapter, a norm over all heads, or heads or features that do not divide.
        """
        sizes = (config.num_heads, config.num_kv_heads, config.intermediate_size)
        if self.tensor_parallel == 1:
            return
        if is_frozen or config.qk_norm == "flat":
            given = "an adapter" if is_frozen else "a norm over all heads"
            raise ConfigError("tensor parallelism cannot cut this model", given=given, fix="Leave it at 1")
        if any(size % self.tensor_parallel for size in sizes):
            raise ConfigError(
                "tensor parallelism must divide query heads, key heads and the MLP's width",
                given=f"{self.tensor_parallel} and {sizes}",
            )

    def share(self, batches: Sequence[Item]) -> Sequence[Item]:
        """The micro-batches that this rank computes."""
        return batches[self.rank // self.tensor_parallel :: self.count // self.tensor_parallel]

    def is_sharded(self, decoder: Decoder) -> bool:
        """Whether ranks hold parts of the decoder; a frozen base under an adapter is whole on each."""
        return self.count > 1 and decoder.adapter is None

    def shard(self, decoder: Decoder) -> None:
        """Shard the decoder's layers, one at a time, and bring all of it to the job's device."""
        if not self.is_sharded(decoder):
            return
        for layer in decoder.layers:
            if self.tensor_parallel > 1:
                plan = {name: style() for name, style in CUT.items()}
                # Every rank has read the same weights: none needs to be sent.
                parallelize_module(layer, self._mesh["tensor"], plan, src_data_rank=None)
            sharded = fully_shard(layer, mesh=self._mesh["data"])
            # Sums, not means: losses are divided by the global batch's counts already.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if self.tensor_parallel > 1:
                norms = (p for name, p in layer.named_parameters() if ".q_norm." in name or ".k_norm." in name)
                self._of_own_heads.extend(norms)
        decoder.to(self._device_type)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks that computed other micro-batches, in place."""
        if self.count > 1:
            dist.all_reduce(values, group=self._mesh["data"].get_group())
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
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            total = torch.nn.utils.get_total_norm(grads)
            # Scaled by what is no number, every gradient would look like the one at fault.
            if math.isfinite(total):
                torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
            return float(total)
        for parameter in self._of_own_heads:
            # A frozen parent's norms have none.
            if parameter.grad is None:
                continue
            dist.all_reduce(_local(parameter.grad), group=self._mesh["tensor"].get_group())
        squares, local = [], []
        for parameter in parameters:
            if parameter.grad is None:
                # A rank whose share masks nothing still takes part in the sums.
                parameter.grad = torch.zeros_like(parameter)
            if not isinstance(parameter.grad, DTensor):
                self.sum(parameter.grad)
            local.append(_local(parameter.grad))
            squares.append(local[-1].square().sum(dtype=torch.float64) / self._count_copies(parameter.grad))
        square = torch.stack(squares).sum().cpu()
        dist.all_reduce(square)
        norm = float(square.sqrt())
        if norm > max_norm:
            for grad in local:
                grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def _count_copies(self, tensor: Tensor) -> int:
        # How many ranks hold the same part.
        if not isinstance(tensor, DTensor):
            return self.count
        mesh, places = tensor.device_mesh, tensor.placements
        return self.count // math.prod(mesh.size(dim) for dim, place in enumerate(places) if not place.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
