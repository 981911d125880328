"""Tensor roots of live weights: the same digest whether the tensors lie in memory, one file or many."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ar2diff.errors import ModelError
from ar2diff.hashing import TensorDigest, tensor_root

# The names that safetensors gives to the dtypes.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def digest_tensor(name: str, tensor: Tensor) -> TensorDigest:
    """The digest of one tensor: its safetensors dtype name, shape, and SHA-256 of its raw bytes."""
    if tensor.dtype not in DTYPE_NAMES:
        raise ModelError(f"tensor {name} has a dtype that no root is defined for", given=str(tensor.dtype))
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return TensorDigest(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), hashlib.sha256(raw.data).hexdigest())


def root_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The tensor root of named tensors; see `hashing.tensor_root`."""
    return tensor_root(digest_tensor(name, tensor) for name, tensor in tensors.items())
