"""A3, A12: training began from exactly the base's tensors, and the checkpoint holds exactly its class's tensors."""

from pathlib import Path
from typing import Any

from ar2diff.audit.claims.parent import check_parent
from ar2diff.audit.claims.told import check_base_name, check_described, check_recipe
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of, read_object
from ar2diff.audit.tensor_files import (
    ADAPTER_NAME,
    TensorRoots,
    both_roots,
    list_model_tensors,
    list_tensors,
    stored_root,
)
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.families.table import find_family, read_decoder_config
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent

DIFFUSION_KEY, RUN_NAME = "ar2diff", "run.json"
ADAPTER_CONFIG_NAME, ADAPTER_PREFIX = "adapter_config.json", "base_model.model."
ADAPTER_FIELDS = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules"}
DTYPE_WORDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def check_start(run: RunFiles, result: ClaimResult) -> None:
    """A3: the base's root, recomputed from its files, is the root that training started from, as stored and live."""
    starts = run.find("train_started")
    if not starts:
        result.missing("a start of training", found_in=LEDGER_NAME)
        return
    base = run.base_path()
    if base is None:
        result.missing("the base model's files", found_in="base/")
        return
    stored, live = _base_roots(base)
    where = run.name(base)
    for event in starts:
        _check_event(event, stored, live, where, result)
        check_base_name(run, event, base, result)
    _check_records(run, stored, where, result)
    _check_settings(run, starts[-1], result)
    check_recipe(run, "train", starts[-1], starts[-1].data.get("config"), result)
    check_recipe(run, "base", starts[-1], {"source": starts[-1].data.get("base")}, result)


def check_inventory(run: RunFiles, result: ClaimResult) -> None:
    """A12: names, shapes and dtypes of the newest checkpoint, both ways, against what its config.json describes."""
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        result.missing("a checkpoint", found_in="checkpoints/")
        return
    where = run.name(checkpoint)
    config = read_object(checkpoint / "config.json")
    wanted = expected_shapes(config) | _check_adapter(checkpoint, where, config, result)
    found = {tensor.name: tensor for tensor in list_model_tensors(checkpoint)}
    here = {"claimed_in": f"{where}/config.json", "found_in": f"{where}/model.safetensors"}
    result.equal("tensors that are missing", [], sorted(set(wanted) - set(found)), **here)
    result.equal("tensors that no place is for", [], sorted(set(found) - set(wanted)), **here)
    wrong = [name for name in sorted(set(wanted) & set(found)) if wanted[name] != found[name].shape]
    result.equal("tensors of another shape", [], wrong, **here)
    dtype = DTYPE_WORDS.get(str(config.get("dtype")))
    result.equal("dtypes", [dtype], sorted({tensor.dtype for tensor in found.values()}), **here)
    _check_diffusion(run, config, where, result)
    _check_adapter_settings(run, checkpoint, result)


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


def _check_adapter(
    checkpoint: Path, where: str, config: dict[str, Any], result: ClaimResult
) -> dict[str, tuple[int, ...]]:
    """The shapes that the adapter adds, none without one; it must be this checkpoint's, and both its files there."""
    path = checkpoint / ADAPTER_CONFIG_NAME
    if not path.is_file():
        if (checkpoint / ADAPTER_NAME).exists():
            result.fail("the adapter is described", "no such file", found_in=f"{where}/{ADAPTER_CONFIG_NAME}")
        return {}
    stored = read_object(path)
    own, here = stored.get("ar2diff") or {}, {"claimed_in": f"{where}/{ADAPTER_CONFIG_NAME}"}
    root = stored_root(list_tensors(checkpoint))
    result.equal(
        "tensor root of the model under the adapter", own.get("base_tensor_root"), root, found_in=where, **here
    )
    mask = (config.get(DIFFUSION_KEY) or {}).get("mask_token_id")
    result.equal("mask token", own.get("mask_token_id"), mask, found_in=f"{where}/config.json", **here)
    return adapter_shapes(config, stored)


def _check_adapter_settings(run: RunFiles, checkpoint: Path, result: ClaimResult) -> None:
    """An adapter has the rank, scale and places of the training's settings, and there is none without them."""
    started, path = run.last("train_started"), checkpoint / ADAPTER_CONFIG_NAME
    if started is None:
        return
    asked = (started.data.get("config") or {}).get("adapter")
    stored = read_object(path) if path.is_file() else None
    found = None if stored is None else {ours: stored.get(theirs) for ours, theirs in ADAPTER_FIELDS.items()}
    wanted = None if asked is None else {name: asked.get(name) for name in ADAPTER_FIELDS}
    here = {"claimed_in": line_of(started), "found_in": f"{run.name(checkpoint)}/{ADAPTER_CONFIG_NAME}"}
    result.equal("settings of the adapter", wanted, found, **here)
    if stored is not None:
        check_parent(run, checkpoint, int(started.data["mask_token_id"]), result)


def _base_roots(base: Path) -> TensorRoots:
    if base.is_file():
        from ar2diff.audit.live.gguf_root import gguf_root

        root = gguf_root(base)
        return TensorRoots(stored=root, live=root)
    tensors = list_tensors(base)
    tied = read_decoder_config(read_object(base / "config.json")).tied_head
    return both_roots(tensors, tied_head=tied)


def _check_event(event: LedgerEvent, stored: str, live: str, where: str, result: ClaimResult) -> None:
    here = {"claimed_in": line_of(event), "found_in": where}
    result.equal("tensor root of the base as stored", event.data.get("base_tensor_root"), stored, **here)
    result.equal("tensor root of the live weights (fp32)", event.data.get("live_tensor_root"), live, **here)
    for name in ("missing", "unexpected"):
        result.equal(f"{name} tensors", [], event.data.get(name), claimed_in="strict load", found_in=line_of(event))


def _check_records(run: RunFiles, stored: str, where: str, result: ClaimResult) -> None:
    """What else names the base's root: run.json, the checkpoint's state, the evaluation."""
    named: dict[str, object] = {}
    if (run.folder / RUN_NAME).is_file():
        named[RUN_NAME] = read_object(run.folder / RUN_NAME).get("base_tensor_root")
    if (checkpoint := run.latest_checkpoint()) and (checkpoint / "training.json").is_file():
        named[f"{run.name(checkpoint)}/training.json"] = read_object(checkpoint / "training.json").get(
            "base_tensor_root"
        )
    for event in run.find("evaluate"):
        named[line_of(event)] = (event.data.get("roots") or {}).get("parent")
    for place, root in named.items():
        result.equal("tensor root of the base", root, stored, claimed_in=place, found_in=where)


def _check_settings(run: RunFiles, started: LedgerEvent, result: ClaimResult) -> None:
    """The training's settings beside the run are those that the ledger holds."""
    if (run.folder / RUN_NAME).is_file() and (written := read_object(run.folder / RUN_NAME)).get("config"):
        here = {"claimed_in": line_of(started), "found_in": RUN_NAME}
        result.equal("settings of the training", started.data.get("config"), written["config"], **here)


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
