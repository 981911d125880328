"""Mistral without an effective sliding window (v0.2 and later)."""

from collections.abc import Mapping
from typing import Any

from ar2diff.models.config import DecoderConfig
from ar2diff.models.families.adapter import FamilyAdapter, shared_tensor_names
from ar2diff.models.families.fields import Fields, read_activation, read_common, refuse_sliding_window


def to_config(stored: Mapping[str, Any]) -> DecoderConfig:
    """Read a mistral config.json; a file that does not name `sliding_window` means 4096, null means none."""
    fields = Fields({"sliding_window": 4096, **stored})
    refuse_sliding_window(fields, used=True)
    return DecoderConfig(**read_common(fields), activation=read_activation(fields))


ADAPTER = FamilyAdapter(to_config=to_config, tensor_names=shared_tensor_names)
