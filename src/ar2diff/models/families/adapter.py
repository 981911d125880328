"""What a family file provides, and the tensor names most families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ar2diff.models.config import DecoderConfig

PRE_NORMS = {"attention_in_norm": "input_layernorm", "mlp_in_norm": "post_attention_layernorm"}
POST_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
SANDWICH_NORMS = {
    "attention_in_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_in_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_NORMS = {"pre": PRE_NORMS, "post": POST_NORMS, "sandwich": SANDWICH_NORMS}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyAdapter:
    """A family: its config.json as a `DecoderConfig`, and our tensor names as the files' names.

    Attributes:
        allowed_keys: config keys that are refused elsewhere but have a known meaning in this family.
    """

    to_config: Callable[[Mapping[str, Any]], DecoderConfig]
    tensor_names: Callable[[DecoderConfig], dict[str, str]]
    allowed_keys: frozenset[str] = frozenset()


def shared_tensor_names(config: DecoderConfig) -> dict[str, str]:
    """Our tensor names to the Hugging Face names that every supported family uses."""
    names = {"embedding.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    if not config.tied_head:
        names["head.weight"] = "lm_head.weight"
    for idx in range(config.num_layers):
        ours, theirs = f"layers.{idx}", f"model.layers.{idx}"
        for our_part, their_part in _layer_names(config).items():
            names[f"{ours}.{our_part}"] = f"{theirs}.{their_part}"
    return names


def _layer_names(config: DecoderConfig) -> dict[str, str]:
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _NORMS[config.norm_placement].items()}
    biased = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.output_bias}
    for part, has_bias in biased.items():
        for kind in ("weight", "bias") if has_bias else ("weight",):
            names[f"attention.{part}_proj.{kind}"] = f"self_attn.{part}_proj.{kind}"
    for part in ("gate", "up", "down"):
        for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
            names[f"mlp.{part}_proj.{kind}"] = f"mlp.{part}_proj.{kind}"
    if config.qk_norm is not None:
        for part in ("q", "k"):
            names[f"attention.{part}_norm.weight"] = f"self_attn.{part}_norm.weight"
    return names
