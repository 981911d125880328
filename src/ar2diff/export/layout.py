"""What an export folder is made of, and the parts that most targets share."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ar2diff.export.source import ExportSource, PlannedTensor

_DTYPE_WORDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
REMOTE_DIR = Path(__file__).parent / "remote"


_MODEL_CODE = '''"""The model class: the family's own computation in transformers, decoded by block diffusion."""

from transformers import {base}

from .block_diffusion import BlockDiffusionMixin{own_import}


class {class_name}(BlockDiffusionMixin, {base}):
    """See block_diffusion.py."""{own_field}
'''
_CONFIG_CODE = '''"""The config class: the family's own, under the name of this format."""

from typing import Any

from transformers import {base}


class {name}({base}):
    """Fields as in the family's config; `rope_theta` stays a plain attribute, which engines read."""

    model_type = "{model_type}"

    def __init__(self, rope_theta: float = 10000.0, **fields: Any) -> None:
        super().__init__(rope_theta=rope_theta, **fields)
        self.rope_theta = rope_theta
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """A config class for remote code: its name and file, what it derives from, and its model_type."""

    name: str
    module: str
    base: str
    model_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One target's folder.

    Attributes:
        config: config.json.
        tensors: the weights, in file order.
        mask_token_id: where the mask is in this format.
        files: other text files by name.
        readme: how to run it.
    """

    config: dict[str, Any]
    tensors: Sequence[PlannedTensor]
    mask_token_id: int
    readme: str
    files: dict[str, str] = field(default_factory=dict)


def shared_config(source: ExportSource) -> dict[str, Any]:
    """The fields that every Llama-shaped config.json has, `rope_theta` as a plain number among them."""
    model, tokenizer = source.config, source.tokenizer
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": _bos_id(source),
        "eos_token_id": tokenizer.eos_token_ids[0],
        "pad_token_id": pad_id(source),
        "mask_token_id": source.diffusion.mask_token_id,
        "block_size": source.diffusion.block_size,
        "dtype": _DTYPE_WORDS[source.dtype],
    }


def untied(source: ExportSource) -> list[PlannedTensor]:
    """All tensors under the family's names, and a head of its own that never says MASK."""
    tensors = [source.plan(ours) for ours in source.names if ours != "head.weight"]
    shape = source.shape("embedding.weight")
    return [*tensors, PlannedTensor(name="lm_head.weight", shape=shape, build=lambda: head_without_mask(source))]


def head_without_mask(source: ExportSource) -> Tensor:
    """The output matrix with a zero row for MASK: engines do not ban it, and its logit must never win."""
    rows = source.head_rows().clone()
    rows[source.diffusion.mask_token_id] = 0.0
    return rows


def pad_id(source: ExportSource) -> int:
    """The padding token, or the end of a turn where there is none."""
    named = source.tokenizer.pad_token_id
    return source.tokenizer.eos_token_ids[0] if named is None else named


def remote_files(base: str, class_name: str, module: str, *, config: RemoteConfig | None = None) -> dict[str, str]:
    """The modelling files for transformers: the shared generation code, and a few lines that name the family.

    Args:
        base: the class of transformers that computes the model.
        class_name, module: of the model class here and its file, without ending.
        config: the config class that the format demands; None keeps the family's own.
    """
    files = {"block_diffusion.py": (REMOTE_DIR / "block_diffusion.py").read_text(encoding="utf-8")}
    own_import = own_field = ""
    if config is not None:
        files[f"{config.module}.py"] = _CONFIG_CODE.format(**asdict(config))
        own_import = f"\nfrom .{config.module} import {config.name}"
        own_field = f"\n\n    config_class = {config.name}"
    files[f"{module}.py"] = _MODEL_CODE.format(
        base=base, class_name=class_name, own_import=own_import, own_field=own_field
    )
    return files


def diffusion_entry(source: ExportSource) -> dict[str, Any]:
    """The `block_diffusion` entry of config.json, which the generation code reads."""
    return {**source.diffusion.as_json(), "num_known_ids": source.tokenizer.vocab_size}


def render_readme(title: str, facts: dict[str, str], body: str) -> str:
    """A README: the facts as a table, then how to run it."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"# {title}\n\n| what | value |\n|---|---|\n{rows}\n\n{body.strip()}\n"


def base_facts(source: ExportSource) -> dict[str, str]:
    """What a user of an exported model has to know."""
    diffusion = source.diffusion
    return {
        "block size": f"{diffusion.block_size} (trained: {', '.join(map(str, diffusion.trained_block_sizes))})",
        "mask token id": str(diffusion.mask_token_id),
        "end of turn ids": ", ".join(map(str, source.tokenizer.eos_token_ids)),
        "logits": "shifted: row i predicts token i + 1" if diffusion.shift_logits else "row i predicts token i",
        "clean attention": diffusion.clean_attention,
        "weights": _DTYPE_WORDS[source.dtype],
    }


def _bos_id(source: ExportSource) -> int | None:
    declared = source.hf_config.get("bos_token_id")
    return declared if isinstance(declared, int) else None
