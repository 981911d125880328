"""What happens before the first step: the folder is this run's, the base gets its mask token and its adapter."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ar2diff.data.pipeline import fingerprint_tokenizer
from ar2diff.data.stream import RowStream
from ar2diff.errors import CheckpointError, ConfigError, DataError, ModelError, RunError
from ar2diff.files import check_free_space, read_json, write_json
from ar2diff.models.adapters import GatedAdapter
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import LoadedModel, load_model
from ar2diff.models.mask_token import MASK_TEXT, add_mask_token, choose_mask_token
from ar2diff.provenance.ledger import Ledger
from ar2diff.train.checkpoint import (
    CHECKPOINTS_DIR,
    TrainingState,
    checkpoint_dir,
    find_newest_good_checkpoint,
    is_checkpoint,
    list_checkpoints,
    read_state_digest,
    restore_set_aside,
    step_of,
)
from ar2diff.train.config import TrainConfig
from ar2diff.train.distill import Distillation, copy_parent
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.parallel import Ranks

RUN_NAME = "run.json"


def prepare_base(loaded: LoadedModel, config: TrainConfig) -> tuple[LoadedModel, int]:
    """The base ready for training, and its mask token's id. The decoder is changed in place.

    A converted checkpoint keeps its own mask row as it was trained; one with an adapter is trained on from there.

    Raises:
        ConfigError: the base has an adapter and the run none, or another one.
    """
    mask_token_id = None if loaded.diffusion is None else loaded.diffusion.mask_token_id
    if mask_token_id is None:
        loaded, token = add_mask_token(loaded)
        mask_token_id = token.id
    adapter = loaded.decoder.adapter
    if adapter is None and config.adapter is not None:
        GatedAdapter(loaded.decoder, config.adapter, mask_token_id=mask_token_id, seed=config.seed)
    elif adapter is not None and adapter.config != config.adapter:
        raise ConfigError(
            "the base has an adapter", given=adapter.config, fix="Repeat its settings, or merge it first"
        )
    return loaded, mask_token_id


def load_teacher(path: Path, device: str, student: LoadedModel) -> Decoder:
    """A frozen model to distil from, its vocabulary as large as that of a conversion of it.

    Raises:
        ModelError: its tokens or the scale of its logits are not the student's.
    """
    loaded = load_model(path, dtype=torch.float32, device=device)
    if loaded.diffusion is None:
        loaded, _ = add_mask_token(loaded)
    ours, theirs = ((fingerprint_tokenizer(model.tokenizer), model.config.logit_scale) for model in (student, loaded))
    if ours != theirs:
        raise ModelError(
            "the teacher's tokens or its logits' scale are not the student's",
            given=str(path),
            fix="Distil from the model that the student was made of",
        )
    return loaded.decoder.requires_grad_(False).eval()


def build_distillation(config: TrainConfig, decoder: Decoder, teacher: Decoder | None = None) -> Distillation | None:
    """What the run distils from: its own clean stream under an adapter, else `teacher` or a frozen copy of itself."""
    objective = config.objective
    if not objective.distill_weight:
        return None
    parent = None
    if decoder.adapter is None:
        parent = teacher or copy_parent(decoder, share_embeddings=config.optim.freeze_embeddings)
    return Distillation(
        weight=objective.distill_weight,
        top_k=objective.distill_top_k,
        shift_logits=objective.shift_logits,
        parent=parent,
    )


def check_documents(stream: RowStream, loaded: LoadedModel, objective: ObjectiveConfig) -> None:
    """Refuse data that the model cannot read or predict, or in which no token carries a loss.

    Raises:
        DataError: see above.
    """
    if loaded.diffusion is not None:
        mask_token_id = loaded.diffusion.mask_token_id
    else:
        mask_token_id = choose_mask_token(loaded.tokenizer, loaded.config, loaded.hf_config).id
    stream.check_ids(vocab_size=loaded.config.vocab_size, mask_token_id=mask_token_id)
    response_lens, prompt_lens = stream.response_lens, stream.prompt_lens
    if (longest := int((prompt_lens + response_lens).max())) > loaded.config.max_seq_len:
        raise DataError(
            "a document is longer than the model's context",
            given=f"{longest} tokens, context {loaded.config.max_seq_len}",
            fix="Prepare the data again with a lower max_document_len",
        )
    # Blocks of a shifted model are given a token, their own first or the last before them; the clean stream is given
    # the first of all.
    if objective.anchor == "last":
        has_masked = (response_lens > 0) & (prompt_lens + response_lens > 1)
    else:
        has_masked = response_lens > (1 if objective.shift_logits else 0)
    has_next = (prompt_lens + response_lens > 1) if objective.ar_weight else np.zeros_like(has_masked)
    if not (has_masked | has_next).any():
        raise DataError(
            "no document has a token to learn",
            given=f"responses of {response_lens.max()} token",
            fix="Prepare the data from documents with longer answers",
        )


def check_space(loaded: LoadedModel, out_dir: Path, *, is_frozen: bool, in_parts: bool) -> None:
    """Refuse a run whose first checkpoint would not fit: weights and two moments of each, twice where in parts.

    Args:
        is_frozen: an adapter is trained; its own weights and moments are some megabytes and not counted.

    Raises:
        SpaceError: says how much is needed.
    """
    num_weights = sum(parameter.numel() for parameter in loaded.decoder.parameters())
    check_free_space(out_dir, (1 if is_frozen else 3) * 4 * num_weights * (2 if in_parts else 1))


def find_start(init: Path | None, ranks: Ranks, ledger: Ledger | None) -> Path | None:
    """The checkpoint to go on from: the one that is named, or the newest whole one of a run's folder.

    Damaged ones of that folder are passed over, with a warning and a ledger event each. All ranks get the same.

    Raises:
        CheckpointError: the folder has no checkpoint, or all are damaged.
    """
    if init is None or is_checkpoint(init) or not (init / CHECKPOINTS_DIR).is_dir():
        return init
    step = -1
    with ranks.agreed():
        if ranks.is_first:
            found = find_newest_good_checkpoint(init, ledger=ledger)
            if found is None:
                raise CheckpointError("the run has no checkpoint yet", given=str(init), fix="Run without --init")
            step = step_of(found)
    return checkpoint_dir(init, int(ranks.first_value(step)))


def check_state(state: TrainingState | None, base_root: str, config_sha256: str, init: Path | None) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        RunError: its base or its settings are others.
    """
    if state is None:
        return
    if state.base_tensor_root != base_root:
        raise RunError("the checkpoint started from another base model", given=str(init), fix="Name that base")
    if state.config_sha256 != config_sha256:
        raise RunError("the checkpoint belongs to a run with other settings", given=str(init), fix="Repeat them")


def enter_run(out_dir: Path, config: TrainConfig, base_root: str, config_sha256: str, *, resuming: bool) -> None:
    """Take a folder for this run; it may be new, or this run's own where it goes on.

    Raises:
        RunError: it belongs to another run, or holds this one although it does not go on.
    """
    restore_set_aside(out_dir)
    path = out_dir / RUN_NAME
    if path.exists():
        stored = read_json(path, error=RunError)
        if not isinstance(stored, dict):
            raise RunError(f"{RUN_NAME} is no object", given=str(path), fix="Restore the file")
        if (stored.get("base_tensor_root"), stored.get("config_sha256")) != (base_root, config_sha256):
            raise RunError("the folder belongs to another run", given=str(out_dir), fix="Choose another folder")
        if not resuming and (found := list_checkpoints(out_dir)):
            raise RunError(
                "the folder holds this run already", given=str(out_dir), fix=f"Go on with --init {found[-1]}"
            )
        return
    if list_checkpoints(out_dir):
        raise RunError("the folder holds checkpoints of an unknown run", given=str(out_dir), fix="Choose another")
    write_json(path, {"base_tensor_root": base_root, "config_sha256": config_sha256, "config": config.as_json()})


def describe_resumed(init: Path, tensor_root: str) -> dict[str, str]:
    """The checkpoint that was taken over: its name, its state's digest, and the root of the live weights."""
    return {"checkpoint": init.name, "state_sha256": read_state_digest(init), "tensor_root": tensor_root}


def describe_training(
    config: TrainConfig, loaded: LoadedModel, mask_token_id: int, loss_refusal: str | None
) -> dict[str, object]:
    """What is trained, for the ledger.

    Args:
        loss_refusal: why the fused loss is not used where it was asked for.
    """
    return {
        "mask_token_id": mask_token_id,
        "mask_token": loaded.tokenizer.id_to_token(mask_token_id) or MASK_TEXT,
        "block_size": config.objective.block_sizes[-1],
        "shift_logits": config.objective.shift_logits,
        "objective": config.as_json()["objective"],
        "fused_loss_refused": loss_refusal,
    }


def build_settings(
    objective: ObjectiveConfig, block_sizes_done: Sequence[int], mask_token_id: int
) -> DiffusionConfig:
    """What a checkpoint says of itself: block sizes trained so far, ascending, the largest as its own."""
    trained = tuple(block_sizes_done) or objective.block_sizes[:1]
    return DiffusionConfig(
        block_size=trained[-1],
        trained_block_sizes=trained,
        shift_logits=objective.shift_logits,
        mask_token_id=mask_token_id,
        clean_attention=objective.clean_attention,
        anchor=objective.anchor,
    )
