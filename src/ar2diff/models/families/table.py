"""The supported families, by the `model_type` of their config.json."""

from collections.abc import Mapping
from typing import Any

from ar2diff.errors import ConfigError, ModelError, UnsupportedModelError
from ar2diff.models.config import DecoderConfig
from ar2diff.models.families import gemma3_text, granite, llama, minicpm, mistral, olmo2, qwen2, qwen3, smollm3
from ar2diff.models.families.adapter import FamilyAdapter
from ar2diff.models.families.fields import Fields

FAMILIES: dict[str, FamilyAdapter] = {
    "gemma3_text": gemma3_text.ADAPTER,
    "granite": granite.ADAPTER,
    "llama": llama.ADAPTER,
    "minicpm": minicpm.ADAPTER,
    "mistral": mistral.ADAPTER,
    "olmo2": olmo2.ADAPTER,
    "qwen2": qwen2.ADAPTER,
    "qwen3": qwen3.ADAPTER,
    "smollm3": smollm3.ADAPTER,
}

# Keys that announce a computation this version does not do, whatever the family.
_REFUSED_KEYS = {
    "auto_map": "code that comes with the model (auto_map)",
    "quantization_config": "quantised weights (quantization_config)",
    "num_experts": "a mixture of experts (num_experts)",
    "num_local_experts": "a mixture of experts (num_local_experts)",
    "n_routed_experts": "a mixture of experts (n_routed_experts)",
    "text_config": "a multimodal model (text_config)",
}


def find_family(hf_config: Mapping[str, Any]) -> FamilyAdapter:
    """The adapter for a config.json.

    Raises:
        UnsupportedModelError: the model type, or a feature that the config announces, is not supported.
    """
    fields = Fields(hf_config)
    model_type = fields.text("model_type")
    allowed = FAMILIES[model_type].allowed_keys if model_type in FAMILIES else frozenset()
    for key, feature in _REFUSED_KEYS.items():
        if key not in allowed and hf_config.get(key):
            raise UnsupportedModelError(f"{feature} is not supported", given=key)
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            "this model_type is not supported", given=model_type, fix=f"Use one of {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def read_decoder_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises:
        ModelError: a key is missing or holds a wrong type or an impossible value.
        UnsupportedModelError: a feature is not supported.
    """
    try:
        return find_family(hf_config).to_config(hf_config)
    except ConfigError as error:
        raise ModelError(f"config.json describes no possible decoder: {error.problem}", given=error.given) from None
