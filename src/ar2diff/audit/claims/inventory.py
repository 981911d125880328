"""A12: the checkpoint holds exactly its class's tensors, decodes as it was trained, and its adapter is its own.

A3 asks the same of the model that training began at, where that is not the base itself.
"""

from pathlib import Path
from typing import Any

from ar2diff.audit.claims.parent import check_parent
from ar2diff.audit.claims.told import check_described
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of, read_object
from ar2diff.audit.tensor_files import (
    ADAPTER_NAME,
    StoredTensor,
    list_model_tensors,
    list_tensors,
    read_row,
    stored_root,
)
from ar2diff.hashing import sha256_bytes
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.families.table import find_family, read_decoder_config
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent

DIFFUSION_KEY = "ar2diff"
ADAPTER_CONFIG_NAME, ADAPTER_PREFIX = "adapter_config.json", "base_model.model."
ADAPTER_FIELDS = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules"}
DTYPE_WORDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
EMBEDDING = "model.embed_tokens"
MASK_ROW = f"{ADAPTER_PREFIX}{EMBEDDING}.token_adapter.trainable_tokens_delta"


def check_inventory(run: RunFiles, result: ClaimResult) -> None:
    """A12: names, shapes and dtypes of the newest checkpoint, both ways, against what its config.json describes."""
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        result.missing("a checkpoint", found_in="checkpoints/")
        return
    where = run.name(checkpoint)
    config = read_object(checkpoint / "config.json")
    check_tensors(checkpoint, where, config, result)
    _check_diffusion(run, config, where, result)
    started = run.last("train_started")
    if started is not None and check_adapter_settings(run, started, checkpoint, result):
        check_parent(run, checkpoint, int(started.data["mask_token_id"]), result)


def check_tensors(folder: Path, where: str, config: dict[str, Any], result: ClaimResult) -> None:
    """Names, shapes and dtypes of a folder's tensors are those that its config.json and its adapter describe."""
    wanted = expected_shapes(config) | _check_adapter(folder, where, config, result)
    found = {tensor.name: tensor for tensor in list_model_tensors(folder)}
    here = {"claimed_in": f"{where}/config.json", "found_in": f"{where}/model.safetensors"}
    result.equal("tensors that are missing", [], sorted(set(wanted) - set(found)), **here)
    result.equal("tensors that no place is for", [], sorted(set(found) - set(wanted)), **here)
    wrong = [name for name in sorted(set(wanted) & set(found)) if wanted[name] != found[name].shape]
    result.equal("tensors of another shape", [], wrong, **here)
    dtype = DTYPE_WORDS.get(str(config.get("dtype")))
    result.equal("dtypes", [dtype], sorted({tensor.dtype for tensor in found.values()}), **here)


def expected_shapes(hf_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor that a config.json describes."""
    plain = {key: value for key, value in hf_config.items() if key != DIFFUSION_KEY}
    config = read_decoder_config(plain)
    names = find_family(plain).tensor_names(config)
    return {theirs: shape_of(ours, config) for ours, theirs in names.items()}


def adapter_shapes(hf_config: dict[str, Any], adapter: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Stored name and shape of every tensor of an adapter_config.json: low-rank pairs and the mask row."""
    shapes: dict[str, tuple[int, ...]] = {}
    rank, targets = int(adapter["r"]), set(adapter["target_modules"])
    for name, shape in expected_shapes(hf_config).items():
        layer = name.removesuffix(".weight")
        if name != layer and layer.rsplit(".", 1)[-1] in targets:
            shapes[f"{ADAPTER_PREFIX}{layer}.lora_A.weight"] = (rank, shape[1])
            shapes[f"{ADAPTER_PREFIX}{layer}.lora_B.weight"] = (shape[0], rank)
        elif layer.endswith("embed_tokens"):
            shapes[f"{ADAPTER_PREFIX}{layer}.token_adapter.trainable_tokens_delta"] = (1, shape[1])
    return shapes


def shape_of(name: str, config: DecoderConfig) -> tuple[int, ...]:
    """The shape of one of our tensors; q, k and v rows are heads times head_dim."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    outs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size, "o_proj": hidden}
    outs |= {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}
    ins = {"o_proj": q_size, "down_proj": inner}
    part, kind = name.split(".")[-2:]
    if part in ("embedding", "head"):
        return (config.vocab_size, hidden)
    if part in outs:
        return (outs[part],) if kind == "bias" else (outs[part], ins.get(part, hidden))
    if part in ("q_norm", "k_norm"):
        flat = {"q_norm": q_size, "k_norm": kv_size}
        return (flat[part] if config.qk_norm == "flat" else config.head_dim,)
    return (hidden,)


def check_adapter_settings(run: RunFiles, started: LedgerEvent, folder: Path, result: ClaimResult) -> bool:
    """An adapter has the rank, scale and places of the training's settings, and there is none without them.

    Returns whether there is one.
    """
    path = folder / ADAPTER_CONFIG_NAME
    asked = (started.data.get("config") or {}).get("adapter")
    stored = read_object(path) if path.is_file() else None
    found = None if stored is None else {ours: stored.get(theirs) for ours, theirs in ADAPTER_FIELDS.items()}
    wanted = None if asked is None else {name: asked.get(name) for name in ADAPTER_FIELDS}
    here = {"claimed_in": line_of(started), "found_in": f"{run.name(folder)}/{ADAPTER_CONFIG_NAME}"}
    result.equal("settings of the adapter", wanted, found, **here)
    return stored is not None


def _check_adapter(
    folder: Path, where: str, config: dict[str, Any], result: ClaimResult
) -> dict[str, tuple[int, ...]]:
    """The shapes that the adapter adds, none without one; it must be this model's, and both its files there."""
    path = folder / ADAPTER_CONFIG_NAME
    if not path.is_file():
        if (folder / ADAPTER_NAME).exists():
            result.fail("the adapter is described", "no such file", found_in=f"{where}/{ADAPTER_CONFIG_NAME}")
        return {}
    stored = read_object(path)
    own, here = stored.get("ar2diff") or {}, {"claimed_in": f"{where}/{ADAPTER_CONFIG_NAME}"}
    model = list_tensors(folder)
    root = stored_root(model)
    result.equal(
        "tensor root of the model under the adapter", own.get("base_tensor_root"), root, found_in=where, **here
    )
    mask = (config.get(DIFFUSION_KEY) or {}).get("mask_token_id")
    result.equal("mask token", own.get("mask_token_id"), mask, found_in=f"{where}/config.json", **here)
    if (folder / ADAPTER_NAME).is_file():
        adapter = [tensor for tensor in list_model_tensors(folder) if tensor.path.name == ADAPTER_NAME]
        # Adapters from before it was written do not name it.
        if "adapter_tensor_root" in own:
            root, found_in = stored_root(adapter), f"{where}/{ADAPTER_NAME}"
            result.equal("tensor root of the adapter", own["adapter_tensor_root"], root, found_in=found_in, **here)
        _check_mask_row([*model, *adapter], mask, where, result)
    return adapter_shapes(config, stored)


def _check_mask_row(tensors: list[StoredTensor], mask: object, where: str, result: ClaimResult) -> None:
    """The model under the adapter has the adapter's row for the mask, so that either tells the same story."""
    known = {tensor.name: tensor for tensor in tensors}
    embedding, row = known.get(f"{EMBEDDING}.weight"), known.get(MASK_ROW)
    # What is not there, or has other shapes, is told from the config.
    if embedding is None or row is None or row.shape != (1, *embedding.shape[1:]) or not isinstance(mask, int):
        return
    found = sha256_bytes(read_row(embedding, mask))
    wanted = sha256_bytes(read_row(row, 0))
    here = {"claimed_in": f"{where}/{ADAPTER_NAME}", "found_in": f"{where}/model.safetensors"}
    result.equal("row of the mask", wanted, found, **here)


def _check_diffusion(run: RunFiles, config: dict[str, Any], where: str, result: ClaimResult) -> None:
    place = f"{where}/config.json"
    if not isinstance(config.get(DIFFUSION_KEY), dict):
        result.fail("the checkpoint says how it decodes", "no diffusion settings", found_in=place)
        return
    settings = DiffusionConfig.from_json(config[DIFFUSION_KEY])
    started = run.last("train_started")
    if started is None:
        result.missing("a start of training", found_in=LEDGER_NAME)
        return
    here = {"claimed_in": line_of(started), "found_in": place}
    objective = (started.data.get("config") or {}).get("objective") or {}
    result.equal("mask token", started.data.get("mask_token_id"), settings.mask_token_id, **here)
    result.equal("shift_logits", objective.get("shift_logits"), settings.shift_logits, **here)
    result.equal("clean_attention", objective.get("clean_attention"), settings.clean_attention, **here)
    # Runs from before there was a choice do not name it.
    result.equal("anchor", objective.get("anchor", "predicted"), settings.anchor, **here)
    untrained = sorted(set(settings.trained_block_sizes) - set(objective.get("block_sizes") or []))
    result.equal("block sizes that were not trained", [], untrained, **here)
    check_described(started, run.folder / where, settings.mask_token_id, result)
    rows = expected_shapes(config)["model.embed_tokens.weight"][0]
    inside = settings.mask_token_id < rows
    result.holds(
        "the mask has a row", inside, claimed=settings.mask_token_id, claimed_in=place, found=rows, found_in=place
    )
