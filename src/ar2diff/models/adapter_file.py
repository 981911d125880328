"""Adapters on disk, in the shape of PEFT's files, read strictly.

`adapter_model.safetensors` holds `base_model.model.<layer>.lora_A.weight` and `.lora_B.weight` under the layers'
Hugging Face names, and the trained mask row. `adapter_config.json` is a PEFT LoRA config with an `ar2diff` entry:
the gate rule, the mask token, the tensor root of the model under the adapter and that of the adapter's own tensors.
Format: the PEFT checkpoint page of its documentation.

An exported adapter has a third file, `block_diffusion.json`: the settings that a checkpoint's config.json holds.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ar2diff.errors import ConfigError, ModelError
from ar2diff.files import read_json, write_json
from ar2diff.models.adapters import GATE_RULE, AdapterConfig, GatedAdapter
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.decoder import Decoder
from ar2diff.models.roots import root_of_tensors
from ar2diff.models.safetensors_file import read_file, write_file

ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_DIFFUSION_NAME = "block_diffusion.json"
EXPORTED_NAMES = (ADAPTER_WEIGHTS_NAME, ADAPTER_CONFIG_NAME, ADAPTER_DIFFUSION_NAME)
_PREFIX = "base_model.model."
_OUR_KEYS = {"gate", "mask_token_id", "base_tensor_root"}
# Adapters from before it was written are read without the check.
_ROOT_KEY = "adapter_tensor_root"
_ROOT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """An adapter as its files have it.

    Attributes:
        base_tensor_root: of the model under the adapter, with the trained mask row in it.
    """

    config: AdapterConfig
    mask_token_id: int
    base_tensor_root: str
    tensors: dict[str, Tensor]


def adapter_tensors(decoder: Decoder, names: dict[str, str]) -> dict[str, Tensor]:
    """The live adapter under its stored names.

    Args:
        names: our tensor names to the Hugging Face names.
    """
    adapter = decoder.adapter
    assert adapter is not None
    tensors: dict[str, Tensor] = {}
    for name, parameter in adapter.parameters().items():
        layer, kind = name.rsplit(".", 2)[0], name.rsplit(".", 2)[1]
        tensors[f"{_PREFIX}{names[f'{layer}.weight'].removesuffix('.weight')}.{kind}.weight"] = parameter.detach()
    tensors[_mask_row_name(names)] = decoder.embedding.weight.detach()[adapter.mask_token_id][None]
    return tensors


def save_adapter(folder: Path, decoder: Decoder, names: dict[str, str], *, base_tensor_root: str) -> None:
    """Write the adapter's two files into `folder`.

    Raises:
        SpaceError: not enough free space.
    """
    adapter = decoder.adapter
    assert adapter is not None
    tensors = adapter_tensors(decoder, names)
    write_file(folder / ADAPTER_WEIGHTS_NAME, tensors)
    write_json(folder / ADAPTER_CONFIG_NAME, with_own_root(_as_json(adapter, base_tensor_root), tensors))


def with_own_root(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """An adapter_config.json that names the root of the adapter's own tensors."""
    return {**config, "ar2diff": {**config["ar2diff"], _ROOT_KEY: root_of_tensors(tensors)}}


def read_adapter(folder: Path) -> StoredAdapter | None:
    """The adapter stored in `folder`, or None where there is none.

    Raises:
        ModelError: a file is missing, damaged, or says what this version does not know.
    """
    if not (folder / ADAPTER_CONFIG_NAME).exists() and not (folder / ADAPTER_WEIGHTS_NAME).exists():
        return None
    stored = read_json(folder / ADAPTER_CONFIG_NAME, error=ModelError)
    own = stored.get("ar2diff") if isinstance(stored, dict) else None
    if not isinstance(own, dict) or set(own) - {_ROOT_KEY} != _OUR_KEYS or own["gate"] != GATE_RULE:
        raise ModelError("the adapter states no gate rule that is known", given=str(folder), fix="Use one made here")
    plain = stored.get("peft_type") == "LORA" and stored.get("bias") == "none"
    if not plain or type(own["mask_token_id"]) is not int:
        raise ModelError("the adapter is no plain LoRA", given=str(folder), fix="Use one made here")
    if not _ROOT.fullmatch(str(own["base_tensor_root"])):
        raise ModelError("the adapter names no tensor root of its base", given=str(folder), fix="Use one made here")
    if not (folder / ADAPTER_WEIGHTS_NAME).is_file():
        raise ModelError(f"{ADAPTER_WEIGHTS_NAME} is missing", given=str(folder), fix="Restore the file")
    try:
        targets = tuple(stored["target_modules"])
        config = AdapterConfig(rank=stored["r"], alpha=stored["lora_alpha"], targets=targets)
    except (KeyError, TypeError, ConfigError) as error:
        raise ModelError(f"{ADAPTER_CONFIG_NAME}: {error}", given=str(folder)) from None
    tensors = dict(read_file(folder / ADAPTER_WEIGHTS_NAME))
    if _ROOT_KEY in own and own[_ROOT_KEY] != (found := root_of_tensors(tensors)):
        raise ModelError(
            f"the adapter's tensors are not those that {ADAPTER_CONFIG_NAME} names",
            given=f"tensor root {found}, named {own[_ROOT_KEY]}",
            fix="Fetch the adapter again",
        )
    return StoredAdapter(
        config=config, mask_token_id=own["mask_token_id"], base_tensor_root=own["base_tensor_root"], tensors=tensors
    )


def read_exported(folder: Path) -> tuple[StoredAdapter, DiffusionConfig]:
    """An adapter on its own, as `ar2diff export --to adapter` writes it, and how its model decodes.

    Raises:
        ModelError: a file is missing, damaged or foreign, or the files are of different adapters.
    """
    adapter = read_adapter(folder)
    if adapter is None:
        raise ModelError("no exported adapter", given=str(folder), fix="Name what ar2diff export --to adapter wrote")
    stored = read_json(folder / ADAPTER_DIFFUSION_NAME, error=ModelError)
    try:
        diffusion = DiffusionConfig.from_json(stored)
    except ConfigError as error:
        raise ModelError(f"{ADAPTER_DIFFUSION_NAME}: {error.problem}", given=error.given) from None
    if diffusion.mask_token_id != adapter.mask_token_id:
        given = f"{diffusion.mask_token_id} in {ADAPTER_DIFFUSION_NAME}, {adapter.mask_token_id} in the adapter"
        raise ModelError("the adapter's files name different mask tokens", given=given, fix="Fetch the adapter again")
    return adapter, diffusion


@torch.no_grad()
def attach_adapter(stored: StoredAdapter, decoder: Decoder, names: dict[str, str]) -> None:
    """Hang a stored adapter on its parent's decoder and put the trained mask row into the embedding.

    Raises:
        ModelError: its tensors do not fit the decoder.
    """
    if not 0 <= stored.mask_token_id < decoder.config.vocab_size:
        raise ModelError("the adapter's mask token is beyond the vocabulary", given=stored.mask_token_id)
    GatedAdapter(decoder, stored.config, mask_token_id=stored.mask_token_id, seed=0)
    wanted = adapter_tensors(decoder, names)
    if odd := sorted(set(wanted) ^ set(stored.tensors)):
        raise ModelError("the adapter's tensors do not fit this model", given=odd[0], fix="Use the adapter's parent")
    for name, tensor in wanted.items():
        if tensor.shape != stored.tensors[name].shape:
            given = tuple(stored.tensors[name].shape)
            raise ModelError(f"tensor {name} must have shape {tuple(tensor.shape)}", given=given)
        tensor.copy_(stored.tensors[name])


def find_mask_row(stored: StoredAdapter, names: dict[str, str]) -> Tensor:
    """The trained mask row, shape (1, E).

    Raises:
        ModelError: the adapter has none, or it is of another model's name.
    """
    name = _mask_row_name(names)
    if name not in stored.tensors:
        raise ModelError("the adapter has no mask row for this model", given=name, fix="Use the adapter's parent")
    return stored.tensors[name]


def _mask_row_name(names: dict[str, str]) -> str:
    return f"{_PREFIX}{names['embedding.weight'].removesuffix('.weight')}.token_adapter.trainable_tokens_delta"


def _as_json(adapter: GatedAdapter, base_tensor_root: str) -> dict[str, Any]:
    config = adapter.config
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": list(config.targets),
        "trainable_token_indices": {"embed_tokens": [adapter.mask_token_id]},
        "ar2diff": {
            "gate": GATE_RULE,
            "mask_token_id": adapter.mask_token_id,
            "base_tensor_root": base_tensor_root,
        },
    }
