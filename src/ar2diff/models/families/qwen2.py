"""Qwen2 and Qwen2.5: the llama stack with biases on q, k and v."""

from collections.abc import Mapping
from typing import Any

from ar2diff.models.config import DecoderConfig
from ar2diff.models.families.adapter import FamilyAdapter, shared_tensor_names
from ar2diff.models.families.fields import Fields, read_activation, read_common, refuse_sliding_window


def to_config(stored: Mapping[str, Any]) -> DecoderConfig:
    """Read a qwen2 config.json; the window is off unless `use_sliding_window` turns it on."""
    fields = Fields(stored)
    refuse_sliding_window(fields, used=fields.flag("use_sliding_window", False))
    return DecoderConfig(**read_common(fields), qkv_bias=True, activation=read_activation(fields))


ADAPTER = FamilyAdapter(to_config=to_config, tensor_names=shared_tensor_names)
