"""SmolLM3: the llama stack with some layers that see no positions (NoPE)."""

from collections.abc import Mapping
from typing import Any

from ar2diff.errors import ModelError
from ar2diff.models.config import DecoderConfig
from ar2diff.models.families.adapter import FamilyAdapter, shared_tensor_names
from ar2diff.models.families.fields import Fields, read_activation, read_common, refuse_sliding_window


def to_config(stored: Mapping[str, Any]) -> DecoderConfig:
    """Read a smollm3 config.json; heads are tied unless it says otherwise."""
    fields = Fields(stored)
    refuse_sliding_window(fields, used=fields.flag("use_sliding_window", False))
    attention_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        **read_common(fields, tied=True),
        rope_layers=_read_rope_layers(fields),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        activation=read_activation(fields),
    )


def _read_rope_layers(fields: Fields) -> tuple[bool, ...]:
    # The stored list is named for what it lacks but holds 1 where a layer has rotary positions.
    num_layers, stored = fields.integer("num_hidden_layers"), fields.items("no_rope_layers")
    if stored is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        if interval < 1:
            raise ModelError("config.json: no_rope_layer_interval must be at least 1", given=interval)
        return tuple((idx + 1) % interval != 0 for idx in range(num_layers))
    if len(stored) < num_layers or any(entry not in (0, 1) for entry in stored):
        raise ModelError("config.json: no_rope_layers must hold a 0 or 1 per layer", given=str(stored)[:80])
    return tuple(bool(entry) for entry in stored[:num_layers])


ADAPTER = FamilyAdapter(to_config=to_config, tensor_names=shared_tensor_names)
