"""Training that has gone wrong: noticed before the weights change, explained, and its batch kept for a look.

`diverged/step-000013.safetensors` holds the inputs, targets and weights of every micro-batch of that step, and
`.json` beside it what was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ar2diff.errors import TrainingError
from ar2diff.files import write_json
from ar2diff.models.safetensors_file import write_file
from ar2diff.train.batch import TrainingBatch
from ar2diff.train.step import StepLosses

DIVERGED_DIR = "diverged"
_NUM_NAMED = 5


def is_sound(losses: StepLosses, norm: float, *, max_loss: float) -> bool:
    """Whether every loss that there is lies within `max_loss`, and the gradient's norm is a number."""
    found = [value for value in (losses.diffusion, losses.ar, losses.distill) if value is not None]
    # A comparison with a value that is no number is false.
    return all(abs(value) <= max_loss for value in found) and norm < float("inf")


def unsound_gradients(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names of parameters whose gradient holds values that are not finite."""
    grads = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    local = {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return [name for name, grad in local.items() if not torch.isfinite(grad).all()]


def divergence_error(
    losses: StepLosses,
    norm: float,
    batches: Sequence[TrainingBatch],
    *,
    step: int,
    max_loss: float,
    gradients: Sequence[str],
    kept: str,
) -> TrainingError:
    """What to tell the user whose training diverged at `step`.

    Args:
        gradients: the parameters whose gradient is not finite.
        kept: what became of the batch, as a clause that follows "or".
    """
    row_ids = [row_id for batch in batches for row_id in batch.row_ids]
    named = ", ".join(gradients[:_NUM_NAMED]) + (" and others" if len(gradients) > _NUM_NAMED else "")
    return TrainingError(
        f"training diverged at step {step}: {_what(losses, norm, max_loss)}",
        given=f"diffusion {losses.diffusion}, next-token {losses.ar}, distillation {losses.distill}, "
        f"gradient {norm}, {f'not finite in {named}, ' if named else ''}rows {row_ids}",
        fix=f"Go on from the last checkpoint with a lower learning rate, or {kept}",
    )


def _what(losses: StepLosses, norm: float, max_loss: float) -> str:
    found = [abs(value) for value in (losses.diffusion, losses.ar, losses.distill) if value is not None]
    if not all(value < float("inf") for value in found):
        return "a loss is not finite"
    if any(value > max_loss for value in found):
        return f"a loss is above {max_loss:g} nats"
    assert not norm < float("inf")
    return "the losses are finite, but their gradient is not"


def save_divergence(
    out_dir: Path, losses: StepLosses, norm: float, batches: Sequence[TrainingBatch], step: int
) -> Path:
    """Keep the batch and what was measured; returns the tensors' file.

    Raises:
        SpaceError: not enough free space.
    """
    path = out_dir / DIVERGED_DIR / f"step-{step:06d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"batch_{idx}.{name}": t for idx, batch in enumerate(batches) for name, t in _tensors(batch).items()}
    write_file(path, tensors)
    row_ids = [list(batch.row_ids) for batch in batches]
    # JSON knows no NaN: what was measured is kept as text.
    measured = {name: str(value) for name, value in asdict(losses).items()} | {"grad_norm": str(norm)}
    write_json(path.with_suffix(".json"), {"step": step, "row_ids": row_ids, **measured})
    return path


def _tensors(batch: TrainingBatch) -> dict[str, Tensor]:
    places = batch.layout.places
    return {
        "token_ids": batch.token_ids_L,
        "document_idx": places.document_idx,
        "stream_idx": places.stream_idx,
        "block_idx": places.block_idx,
        "position_idx": places.position_idx,
        "logit_idx": batch.logit_idx_P,
        "target_ids": batch.target_ids_P,
        "weights": batch.weights_P,
    }
