"""Typed reading of a Hugging Face config.json: every fault names the key, nothing is guessed."""

from collections.abc import Mapping
from typing import Any

from ar2diff.errors import ModelError, UnsupportedModelError
from ar2diff.models.config import Activation, RopeScaling

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_FIX = "Restore the model's own config.json"
_REQUIRED = object()


class Fields:
    """A config.json whose values are read by key and type; JSON null counts as absent."""

    def __init__(self, stored: Mapping[str, Any], *, where: str = "config.json") -> None:
        self._stored, self._where = stored, where

    def has(self, key: str) -> bool:
        """Whether the key holds a value other than null."""
        return self._stored.get(key) is not None

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        """An integer; a bool is not one."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite integer or float, as a float."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise self._wrong(key, "a finite number", value)
        return float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """A bool."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def object(self, key: str) -> "Fields | None":
        """A nested object, or None where it is absent."""
        value = self._stored.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return Fields(value, where=f"{self._where}: {key}")

    def items(self, key: str) -> list[Any] | None:
        """A list, or None where it is absent."""
        value = self._stored.get(key)
        if value is not None and not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    def keys(self) -> set[str]:
        """The keys that hold a value."""
        return {key for key, value in self._stored.items() if value is not None}

    def _value(self, key: str, default: Any) -> Any:
        value = self._stored.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self._where} lacks {key}", fix=_FIX)
            return default
        return value

    def _wrong(self, key: str, wanted: str, value: Any) -> ModelError:
        return ModelError(f"{self._where}: {key} must be {wanted}", given=repr(value), fix=_FIX)


def read_activation(fields: Fields, key: str = "hidden_act", default: str | None = None) -> Activation:
    """The MLP activation.

    Raises:
        UnsupportedModelError: an activation this version does not compute.
    """
    name = fields.text(key) if default is None else fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"activation {key}={name} is not supported", given=name)
    return _ACTIVATIONS[name]


def read_rope(fields: Fields, *, default_theta: float | None = None) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    Raises:
        UnsupportedModelError: a rope type other than plain and llama3, or rotation of a part of the head.
    """
    parameters = fields.object("rope_parameters") or fields.object("rope_scaling") or Fields({})
    at = parameters if parameters.has("rope_theta") else fields
    theta = at.number("rope_theta") if default_theta is None else at.number("rope_theta", default_theta)
    if theta <= 0:
        raise ModelError("config.json: rope_theta must be positive", given=theta)
    for place in (fields, parameters):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported")
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModelError(f"rope type {kind} is not supported", given=kind)
    scaling = RopeScaling(
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_max_seq_len=parameters.integer("original_max_position_embeddings"),
    )
    return theta, scaling


def read_head_dim(fields: Fields) -> int:
    """`head_dim`, or hidden_size / num_attention_heads where the file names none."""
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if heads < 1 or hidden % heads:
        raise ModelError(
            "config.json: hidden_size is not a multiple of num_attention_heads",
            given=f"{hidden} and {heads}",
            fix=_FIX,
        )
    return hidden // heads


def read_common(fields: Fields, *, default_theta: float | None = None, tied: bool = False) -> dict[str, Any]:
    """What every family's config.json says in the same words, as keyword arguments of `DecoderConfig`."""
    theta, scaling = read_rope(fields, default_theta=default_theta)
    heads = fields.integer("num_attention_heads")
    return {
        "model_type": fields.text("model_type"),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": read_head_dim(fields),
        "max_seq_len": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied_head": fields.flag("tie_word_embeddings", tied),
    }


def refuse_sliding_window(fields: Fields, *, used: bool) -> None:
    """Refuse layers that attend within a window shorter than the context.

    Args:
        fields: the config.json.
        used: whether the family applies `sliding_window` where `layer_types` does not say which layers do.
    """
    context, num_layers = fields.integer("max_position_embeddings"), fields.integer("num_hidden_layers")
    kinds = fields.items("layer_types")
    if odd := sorted({str(kind) for kind in kinds or ()} - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(f"layer_types {odd[0]} is not supported", given=odd[0])
    if kinds is not None:
        slides = "sliding_attention" in kinds
    else:
        slides = used and fields.has("sliding_window") and fields.integer("max_window_layers", 0) < num_layers
    window = fields.integer("sliding_window", 0)
    if slides and window < context:
        raise UnsupportedModelError(
            "sliding_window attention is not supported", given=f"window {window}, context {context}"
        )
