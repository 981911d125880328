"""OLMo 2: norms on each sublayer's output instead of its input, and on all query and key heads at once."""

from collections.abc import Mapping
from typing import Any

from ar2diff.models.config import DecoderConfig
from ar2diff.models.families.adapter import FamilyAdapter, shared_tensor_names
from ar2diff.models.families.fields import Fields, read_activation, read_common, refuse_sliding_window


def to_config(stored: Mapping[str, Any]) -> DecoderConfig:
    """Read an olmo2 config.json."""
    fields = Fields(stored)
    refuse_sliding_window(fields, used=True)
    attention_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        **read_common(fields),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        activation=read_activation(fields),
        norm_placement="post",
        qk_norm="flat",
    )


ADAPTER = FamilyAdapter(to_config=to_config, tensor_names=shared_tensor_names)
