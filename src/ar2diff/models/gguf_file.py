"""Read a GGUF file: metadata as a Hugging Face config, tensors dequantised to fp32, the tokenizer rebuilt.

Format: the GGUF specification of the ggml project, version 3.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ar2diff.errors import ModelError, UnsupportedModelError
from ar2diff.models.gguf_tokenizer import build_tokenizer
from ar2diff.tokenizer import Tokenizer

_FETCH = "Fetch the file again"

# Per architecture: the Hugging Face model_type, and whether its q and k rows are stored in interleaved rotary order.
ARCHITECTURES: dict[str, tuple[str, bool]] = {
    "llama": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
# Metadata under "<architecture>." that is understood; anything else could change the computation.
_KNOWN_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "vocab_size",
    }
)
TOP_NAMES: dict[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES: dict[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufContent:
    """A GGUF file understood: `tensors` yields Hugging Face names and fp32 tensors, one at a time."""

    hf_config: dict[str, Any]
    tokenizer: Tokenizer
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]


def read_gguf(path: Path) -> GgufContent:
    """Read a GGUF file's metadata and tokenizer; tensors are read when asked for.

    Raises:
        ModelError: the file is damaged or lacks metadata.
        UnsupportedModelError: an architecture, metadata key, tokenizer or quantisation that is not supported.
    """
    try:
        reader = gguf.GGUFReader(str(path))
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the library lets IndexError, ValueError, UnicodeError and others through
        raise ModelError(f"the GGUF file is damaged: {error}", given=str(path), fix=_FETCH) from None
    architecture = _read(metadata, "general.architecture", str)
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError("this GGUF architecture is not supported", given=architecture, fix=f"Use {known}")
    stored_names = {tensor.name for tensor in reader.tensors}
    hf_config = _derive_config(metadata, architecture, stored_names)
    return GgufContent(
        hf_config=hf_config,
        tokenizer=build_tokenizer(metadata),
        tensors=lambda: _read_tensors(reader, hf_config, interleaved=ARCHITECTURES[architecture][1]),
    )


def undo_interleave(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of a q or k matrix (or bias) from interleaved rotary order (0, D/2, 1, ...) to half-split (0, 1, ...)."""
    split = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def interleave(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """The inverse of `undo_interleave`."""
    split = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def _derive_config(metadata: Mapping[str, Any], architecture: str, tensor_names: set[str]) -> dict[str, Any]:
    own = {
        key.removeprefix(f"{architecture}."): v for key, v in metadata.items() if key.startswith(f"{architecture}.")
    }
    if unknown := sorted(set(own) - _KNOWN_KEYS):
        raise UnsupportedModelError(f"GGUF metadata {architecture}.{unknown[0]} is not supported", given=unknown[0])
    heads, hidden = _read(own, "attention.head_count", int), _read(own, "embedding_length", int)
    head_dim = own.get("attention.key_length", own.get("rope.dimension_count", hidden // max(heads, 1)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(f"GGUF {key} other than the head size is not supported", given=own[key])
    model_type = ARCHITECTURES[architecture][0]
    config = {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": len(_read(metadata, "tokenizer.ggml.tokens", list)),
        "hidden_size": hidden,
        "intermediate_size": _read(own, "feed_forward_length", int),
        "num_hidden_layers": _read(own, "block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _read(own, "context_length", int),
        "rms_norm_eps": _shortest(_read(own, "attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(_read({"rope.freq_base": 10000.0, **own}, "rope.freq_base", (int, float))),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if model_type != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    return config


def _read_tensors(
    reader: gguf.GGUFReader, hf_config: dict[str, Any], *, interleaved: bool
) -> Iterator[tuple[str, Tensor]]:
    heads = {"q_proj": hf_config["num_attention_heads"], "k_proj": hf_config["num_key_value_heads"]}
    for stored in reader.tensors:
        name = _translate_name(stored.name)
        values = _dequantise(stored)
        part = name.split(".")[-2]
        if interleaved and part in heads and values.shape[0] % (2 * heads[part]) == 0:
            values = undo_interleave(values, heads[part])
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {stored.name} holds values that are not finite", fix=_FETCH)
        yield name, torch.from_numpy(values)


def _dequantise(stored: gguf.ReaderTensor) -> NDArray[np.float32]:
    shape = tuple(int(size) for size in reversed(stored.shape))
    try:
        values = gguf.dequantize(stored.data, stored.tensor_type)
    except NotImplementedError:
        kind = stored.tensor_type.name
        raise UnsupportedModelError(f"tensor {stored.name} has an unsupported quantisation", given=kind) from None
    return np.array(values, dtype=np.float32, copy=True).reshape(shape)


def _translate_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in TOP_NAMES:
            return f"{TOP_NAMES[stem]}.{kind}"
        prefix, _, rest = stem.partition(".")
        number, _, part = rest.partition(".")
        if prefix == "blk" and number.isdecimal() and part in LAYER_NAMES:
            return f"model.layers.{int(number)}.{LAYER_NAMES[part]}.{kind}"
    raise UnsupportedModelError("a GGUF tensor has no known place", given=name)


def _read(metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    if key not in metadata:
        raise ModelError(f"the GGUF metadata lacks {key}", fix=_FETCH)
    value = metadata[key]
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ModelError(f"GGUF metadata {key} has the wrong type", given=repr(value)[:80], fix=_FETCH)
    return value


def _shortest(value: float) -> float:
    # GGUF stores fp32; its shortest decimal is the number that the original config.json held.
    with np.errstate(over="ignore"):  # what overflows is refused as not finite
        return float(str(np.float32(value)))
