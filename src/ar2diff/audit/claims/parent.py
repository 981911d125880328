"""Part of A3 and A12: the model under a mask-gated adapter is the base, but for the row of the mask.

Both sides are compared as fp32, which holds every value of a narrower type exactly; one tensor's pieces at a time.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles
from ar2diff.audit.tensor_files import StoredTensor, list_tensors, read_fp32

# Matrices with a row for each token; the mask's is new, or begins anew.
TOKEN_MATRICES = ("model.embed_tokens.weight", "lm_head.weight")
FP32_BYTES = 4


def check_parent(run: RunFiles, checkpoint: Path, mask_token_id: int, result: ClaimResult) -> None:
    """Every tensor of the base is in the checkpoint with the same values."""
    base = run.base_path()
    if base is None:
        result.missing("the base model's files", found_in="base/")
        return
    here = {tensor.name: tensor for tensor in list_tensors(checkpoint)}
    changed = []
    for name, shape, pieces in _read_base(base):
        wanted = _digest(name, shape, pieces, mask_token_id)
        # A tied head may be stored in one of the two alone; which names there must be is told by the config.
        if name in here and _digest_stored(here[name], shape, mask_token_id) != wanted:
            changed.append(name)
    what = "tensors under the adapter that are not the base's"
    result.equal(what, [], changed[:5], claimed_in=run.name(base), found_in=run.name(checkpoint))


def _read_base(base: Path) -> Iterator[tuple[str, tuple[int, ...], Iterable[bytes]]]:
    if base.is_dir():
        for tensor in list_tensors(base):
            yield tensor.name, tensor.shape, read_fp32(tensor)
        return
    from ar2diff.audit.live.gguf_root import read_fp32_tensors

    for name, shape, content in read_fp32_tensors(base):
        yield name, shape, (content,)


def _digest_stored(tensor: StoredTensor, shape: tuple[int, ...], mask_token_id: int) -> str | None:
    # A vocabulary may have grown; nothing else may have another shape.
    if tensor.shape[1:] != shape[1:] or (tensor.shape != shape and tensor.name not in TOKEN_MATRICES):
        return None
    return _digest(tensor.name, shape, read_fp32(tensor), mask_token_id)


def _digest(name: str, shape: tuple[int, ...], pieces: Iterable[bytes], mask_token_id: int) -> str:
    """SHA-256 of the fp32 bytes of the base's rows, without the mask's row where there is one a token."""
    row_bytes = FP32_BYTES * math.prod(shape[1:])
    end = row_bytes * (shape[0] if shape else 1)
    skipped = mask_token_id * row_bytes if name in TOKEN_MATRICES else end
    sha256, at = hashlib.sha256(), 0
    for piece in pieces:
        for start, stop in ((0, skipped), (skipped + row_bytes, end)):
            sha256.update(piece[max(start - at, 0) : max(min(stop, end) - at, 0)])
        at += len(piece)
    return sha256.hexdigest()
