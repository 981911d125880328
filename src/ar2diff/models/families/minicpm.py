"""MiniCPM 1 and 2 (`model_type` minicpm): the llama stack with the scales of the MiniCPM paper (arXiv:2404.06395).

The model's own code is never run; its computation is the one below. MiniCPM5 is stored as plain llama.
"""

import math
from collections.abc import Mapping
from typing import Any

from ar2diff.errors import ModelError, UnsupportedModelError
from ar2diff.models.config import DecoderConfig
from ar2diff.models.families.adapter import FamilyAdapter, shared_tensor_names
from ar2diff.models.families.fields import Fields, read_activation, read_common, refuse_sliding_window


def to_config(stored: Mapping[str, Any]) -> DecoderConfig:
    """Read a minicpm config.json: embeddings x scale_emb, residual branches x scale_depth / sqrt(layers).

    Logits are divided by hidden_size / dim_model_base. Heads are tied unless the file says otherwise.
    """
    fields = Fields(stored)
    refuse_sliding_window(fields, used=True)
    if fields.has("sparse_config"):
        raise UnsupportedModelError("sparse attention (sparse_config) is not supported", given="sparse_config")
    common = read_common(fields, default_theta=10000.0, tied=True)
    base, hidden, layers = fields.integer("dim_model_base"), common["hidden_size"], common["num_layers"]
    if min(base, hidden, layers) < 1:
        raise ModelError(
            "config.json: dim_model_base, hidden_size and num_hidden_layers must be positive", given=base
        )
    attention_bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        **common,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        activation=read_activation(fields),
        embedding_scale=fields.number("scale_emb"),
        residual_scale=fields.number("scale_depth") / math.sqrt(layers),
        logit_scale=base / hidden,
    )


ADAPTER = FamilyAdapter(to_config=to_config, tensor_names=shared_tensor_names, allowed_keys=frozenset({"auto_map"}))
