"""Qwen3 (dense): the llama stack with a norm on every query and key head."""

from collections.abc import Mapping
from typing import Any

from ar2diff.models.config import DecoderConfig
from ar2diff.models.families.adapter import FamilyAdapter, shared_tensor_names
from ar2diff.models.families.fields import Fields, read_activation, read_common, refuse_sliding_window


def to_config(stored: Mapping[str, Any]) -> DecoderConfig:
    """Read a qwen3 config.json; `head_dim` is independent of the hidden size and must be named."""
    fields = Fields(stored)
    refuse_sliding_window(fields, used=fields.flag("use_sliding_window", False))
    attention_bias = fields.flag("attention_bias", False)
    fields.integer("head_dim")
    return DecoderConfig(
        **read_common(fields),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        activation=read_activation(fields),
        qk_norm="head",
    )


ADAPTER = FamilyAdapter(to_config=to_config, tensor_names=shared_tensor_names)
