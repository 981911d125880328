"""A mask-gated adapter on its own: PEFT's two files, with the gate rule that PEFT does not know."""

import json
from pathlib import Path

from ar2diff.errors import ConfigError, ModelError
from ar2diff.export.layout import base_facts, render_readme
from ar2diff.export.source import ExportSource
from ar2diff.files import write_json, write_text
from ar2diff.models.adapter_file import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_DIFFUSION_NAME,
    ADAPTER_WEIGHTS_NAME,
    read_exported,
    with_own_root,
)
from ar2diff.models.safetensors_file import write_file

_BODY = """
The adapter acts on the rows of masks and anchors only (`gate: noisy` in {config}); everywhere else the model is its
parent, bit for bit. PEFT knows no gate: loaded there, the adapter is on everywhere, which is the draft mode alone.

`ar2diff apply BASE ADAPTER --out MODEL` puts it on its base, and MODEL is a folder for every command. The tensor root
of the base with the trained mask row in it must be `{root}`; any other base is refused.
"""


def write_adapter(source: ExportSource, folder: Path) -> None:
    """Write the adapter's files into `folder`.

    Raises:
        ConfigError: the model has no adapter, or it is merged.
    """
    adapter = source.adapter
    if adapter is None or source.is_merged:
        raise ConfigError("there is no adapter of its own to export", given=str(source.folder), fix="Export to hf")
    write_file(folder / ADAPTER_WEIGHTS_NAME, adapter.tensors)
    stored = json.loads((source.folder / ADAPTER_CONFIG_NAME).read_text(encoding="utf-8"))
    write_json(folder / ADAPTER_CONFIG_NAME, with_own_root(stored, adapter.tensors))
    write_json(folder / ADAPTER_DIFFUSION_NAME, source.diffusion.as_json())
    body = _BODY.format(config=ADAPTER_CONFIG_NAME, root=adapter.base_tensor_root)
    write_text(folder / "README.md", render_readme("A mask-gated adapter", base_facts(source), body))


def check_adapter(folder: Path) -> list[tuple[str, str]]:
    """What is wrong with an exported adapter, as (check, found) pairs; see `REASONS`."""
    try:
        adapter, _ = read_exported(folder)
    except ModelError as error:
        return [("files", error.one_line())]
    found = []
    for name, tensor in adapter.tensors.items():
        rank = tensor.shape[0] if ".lora_A." in name else tensor.shape[-1] if ".lora_B." in name else None
        if rank not in (None, adapter.config.rank):
            found.append(("rank", f"tensor {name} has rank {rank}, the config says {adapter.config.rank}"))
    pairs = {name.rsplit(".", 2)[0] for name in adapter.tensors if ".lora_" in name}
    kinds = ("lora_A", "lora_B")
    alone = [f"{layer}.{kind}.weight" for layer in sorted(pairs) for kind in kinds]
    if lost := [name for name in alone if name not in adapter.tensors]:
        found.append(("pairs", f"tensor {lost[0]} is missing"))
    if not any(name.endswith("trainable_tokens_delta") for name in adapter.tensors):
        found.append(("mask row", "the trained mask row is missing"))
    return found


REASONS: dict[str, str] = {
    "files": "Neither ar2diff nor PEFT can load it.",
    "rank": "The update is scaled by alpha over the rank of the config.",
    "pairs": "A layer's update is a product of two matrices.",
    "mask row": "Without it a masked position is noise.",
}
