"""Gemma 3 text models whose layers all attend to the full context; interleaved windows are refused."""

import math
from collections.abc import Mapping
from typing import Any

from ar2diff.errors import ModelError, UnsupportedModelError
from ar2diff.models.config import DecoderConfig
from ar2diff.models.families.adapter import FamilyAdapter, shared_tensor_names
from ar2diff.models.families.fields import Fields, read_activation, read_common


def to_config(stored: Mapping[str, Any]) -> DecoderConfig:
    """Read a gemma3_text config.json.

    Raises:
        UnsupportedModelError: a layer uses a sliding window (it has a rotary base of its own), or logits are capped.
    """
    fields = Fields(stored)
    kinds = fields.items("layer_types")
    if kinds is None or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModelError("sliding_window layers of gemma3_text are not supported", given="layer_types")
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if stored.get(key):
            raise UnsupportedModelError(f"{key} is not supported", given=key)
    attention_bias, scalar = fields.flag("attention_bias", False), fields.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise ModelError("config.json: query_pre_attn_scalar must be positive", given=scalar)
    return DecoderConfig(
        **read_common(Fields(_with_one_rope(stored)), tied=True),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        activation=read_activation(fields, "hidden_activation"),
        norm_placement="sandwich",
        norm_offset=1.0,
        qk_norm="head",
        attention_scale=scalar**-0.5,
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
    )


def _with_one_rope(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 stores one set of rotary parameters per kind of layer; only one kind is left here.
    parameters = stored.get("rope_parameters")
    if isinstance(parameters, dict) and "full_attention" in parameters:
        return {**stored, "rope_parameters": parameters["full_attention"]}
    return stored


ADAPTER = FamilyAdapter(to_config=to_config, tensor_names=shared_tensor_names)
