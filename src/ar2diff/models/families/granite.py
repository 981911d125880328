"""Granite (dense): the llama stack with multipliers on embedding, attention, residual and logits."""

from collections.abc import Mapping
from typing import Any

from ar2diff.errors import ModelError
from ar2diff.models.config import DecoderConfig
from ar2diff.models.families.adapter import FamilyAdapter, shared_tensor_names
from ar2diff.models.families.fields import Fields, read_activation, read_common, refuse_sliding_window


def to_config(stored: Mapping[str, Any]) -> DecoderConfig:
    """Read a granite config.json; all four multipliers must be named."""
    fields = Fields(stored)
    refuse_sliding_window(fields, used=True)
    attention_bias = fields.flag("attention_bias", False)
    divisor = fields.number("logits_scaling")
    if divisor <= 0:
        raise ModelError("config.json: logits_scaling must be positive", given=divisor)
    return DecoderConfig(
        **read_common(fields),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        activation=read_activation(fields),
        attention_scale=fields.number("attention_multiplier"),
        embedding_scale=fields.number("embedding_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        logit_scale=1.0 / divisor,
    )


ADAPTER = FamilyAdapter(to_config=to_config, tensor_names=shared_tensor_names)
