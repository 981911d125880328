"""Part of A11: an averaged model is the mean of the checkpoints that it names, as far as they are still there."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import AVERAGED_DIR, RunFiles, line_of
from ar2diff.audit.tensor_files import StoredTensor, list_model_tensors, read_values, stored_root
from ar2diff.hashing import sha256_file

# A mean in another order of additions differs in the last places.
TOLERANCE = 1e-4


def check_averaged(run: RunFiles, result: ClaimResult) -> None:
    """Root and files as logged, and every tensor the mean of the named checkpoints' tensors."""
    event, folder = run.last("checkpoints_averaged"), run.folder / AVERAGED_DIR
    if event is None:
        if folder.exists():
            what = "the averaged model was made by the training"
            result.fail(what, "no such event", found_in="ledger.jsonl", claimed=AVERAGED_DIR, claimed_in="run")
        return
    if not folder.is_dir():
        result.missing("the averaged model", found_in=AVERAGED_DIR)
        return
    here = {"claimed_in": line_of(event), "found_in": AVERAGED_DIR}
    tensors = list_model_tensors(folder)
    result.equal("tensor root of the averaged model", event.data.get("tensor_root"), stored_root(tensors), **here)
    files = {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()}
    result.equal("files of the averaged model", event.data.get("files"), files, **here)
    names = [str(name) for name in event.data.get("checkpoints") or []]
    known = {path.name: path for path in run.checkpoints()}
    if not names or any(name not in known for name in names):
        result.missing("the checkpoints that were averaged", found=", ".join(names), found_in="checkpoints/")
        return
    wrong = _find_others(tensors, [known[name] for name in names])
    what = f"tensors that are not the mean of {', '.join(names)}"
    result.equal(what, [], wrong[:5], claimed_in=AVERAGED_DIR, found_in="checkpoints/")


def _find_others(tensors: list[StoredTensor], checkpoints: list[Path]) -> list[str]:
    parts = [{tensor.name: tensor for tensor in list_model_tensors(path)} for path in checkpoints]
    return [tensor.name for tensor in tensors if not _is_mean(tensor, [part.get(tensor.name) for part in parts])]


def _is_mean(tensor: StoredTensor, parts: list[StoredTensor | None]) -> bool:
    found: list[npt.NDArray[np.float64]] = [read_values(part) for part in parts if part is not None]
    if len(found) != len(parts) or any(len(values) != len(found[0]) for values in found):
        return False
    mean = np.mean(found, axis=0)
    scale = float(np.abs(mean).max(initial=0.0))
    return bool(np.allclose(read_values(tensor), mean, rtol=0.0, atol=TOLERANCE * scale))
