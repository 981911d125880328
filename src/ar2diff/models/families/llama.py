"""Llama 1 to 3 and the many models stored as `LlamaForCausalLM`, SmolLM2 and MiniCPM5 among them."""

from collections.abc import Mapping
from typing import Any

from ar2diff.models.config import DecoderConfig
from ar2diff.models.families.adapter import FamilyAdapter, shared_tensor_names
from ar2diff.models.families.fields import Fields, read_activation, read_common, refuse_sliding_window


def to_config(stored: Mapping[str, Any]) -> DecoderConfig:
    """Read a llama config.json; files of the first generation name no rope_theta, which means 10000."""
    fields = Fields(stored)
    refuse_sliding_window(fields, used=True)
    attention_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        **read_common(fields, default_theta=10000.0),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        activation=read_activation(fields),
    )


ADAPTER = FamilyAdapter(to_config=to_config, tensor_names=shared_tensor_names)
