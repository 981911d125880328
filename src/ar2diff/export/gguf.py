"""GGUF for llama.cpp: the weights of a Llama or Qwen, the tokenizer, and the mask token as metadata.

Tensors are written one at a time. Format: the GGUF specification of the ggml project, version 3.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from ar2diff.errors import ConfigError, ModelError, UnsupportedModelError
from ar2diff.export.source import ExportSource
from ar2diff.files import PARTIAL_MARK, check_free_space, fsync_dir, fsync_file
from ar2diff.models.families.table import find_family, read_decoder_config
from ar2diff.models.gguf_file import ARCHITECTURES, LAYER_NAMES, TOP_NAMES, interleave, read_gguf
from ar2diff.models.gguf_tokenizer import PRE_TOKENIZERS

Kind = gguf.GGMLQuantizationType
KINDS: dict[str, gguf.GGMLQuantizationType] = {
    "f32": Kind.F32,
    "f16": Kind.F16,
    "bf16": Kind.BF16,
    "q8_0": Kind.Q8_0,
    "q4_0": Kind.Q4_0,
}
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
_OWN_KEYS = ("block_size", "trained_block_sizes", "shift_logits", "clean_attention")
FILE_NAME = "model.gguf"
# Token types of the format.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def write_gguf(source: ExportSource, path: Path, kind: str) -> None:
    """Write one file, whole or not at all.

    Args:
        kind: a name in `KINDS`; norms and biases stay fp32, a matrix whose rows do not fill the quantisation's
            groups stays fp16.

    Raises:
        ConfigError: no such kind.
        UnsupportedModelError: the tokenizer has no GGUF form.
    """
    if kind not in KINDS:
        raise ConfigError("unknown GGUF quantisation", given=kind, fix=f"Use {', '.join(KINDS)}")
    check_free_space(path.parent, sum(_num_bytes(shape, kind) for _, _, shape in _list_tensors(source)))
    partial = path.with_name(f"{path.name}{PARTIAL_MARK}gguf")
    try:
        _write(source, partial, kind)
        fsync_file(partial)
        partial.replace(path)
        fsync_dir(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _write(source: ExportSource, path: Path, kind: str) -> None:
    writer = gguf.GGUFWriter(path, _architecture(source))
    try:
        _add_model(writer, source, kind)
        _add_tokenizer(writer, source)
        tensors = list(_list_tensors(source))
        for _, name, shape in tensors:
            stored = _kind_of(shape, kind)
            stored_shape = gguf.quant_shape_to_byte_shape(shape, stored) if stored not in _FLOATS else shape
            dtype = np.dtype(_FLOATS.get(stored, np.uint8))
            writer.add_tensor_info(name, stored_shape, dtype, _num_bytes(shape, kind), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for ours, _, shape in tensors:
            writer.write_tensor_data(gguf.quantize(_values(source, ours), _kind_of(shape, kind)))
    finally:
        writer.close()


_FLOATS: dict[gguf.GGMLQuantizationType, Any] = {Kind.F32: np.float32, Kind.F16: np.float16}


def _architecture(source: ExportSource) -> str:
    model_type = source.config.model_type
    return next(name for name, (family, _) in ARCHITECTURES.items() if family == model_type)


def _add_model(writer: gguf.GGUFWriter, source: ExportSource, kind: str) -> None:
    model, diffusion = source.config, source.diffusion
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_context_length(model.max_seq_len)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_vocab_size(model.vocab_size)
    # llama.cpp's own key; the others say how to run a block.
    writer.add_bool("diffusion.shift_logits", diffusion.shift_logits)
    writer.add_uint32("ar2diff.block_size", diffusion.block_size)
    writer.add_array("ar2diff.trained_block_sizes", list(diffusion.trained_block_sizes))
    writer.add_bool("ar2diff.shift_logits", diffusion.shift_logits)
    writer.add_string("ar2diff.clean_attention", diffusion.clean_attention)


def _add_tokenizer(writer: gguf.GGUFWriter, source: ExportSource) -> None:
    tokenizer = source.tokenizer
    stored = json.loads(tokenizer.to_json())
    if stored["model"].get("type") != "BPE":
        raise UnsupportedModelError("this tokenizer has no GGUF form", given=str(stored["model"].get("type")))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_splitting_rule(stored["pre_tokenizer"]))
    if not stored["model"]["merges"]:
        raise UnsupportedModelError("llama.cpp refuses a tokenizer without merges", fix="Export to hf")
    tokens, kinds = _list_tokens(source, {token["id"]: token["special"] for token in stored["added_tokens"]})
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = stored["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    ends = tokenizer.eos_token_ids
    writer.add_eos_token_id(ends[0])
    if len(ends) > 1:
        writer.add_eot_token_id(ends[1])
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_mask_token_id(source.diffusion.mask_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _list_tokens(source: ExportSource, added: dict[int, bool]) -> tuple[list[str], list[int]]:
    tokens, kinds = [], []
    for idx in range(source.config.vocab_size):
        text = source.tokenizer.id_to_token(idx)
        is_mask = idx == source.diffusion.mask_token_id
        # A row that the tokenizer does not know still needs a name of its own.
        tokens.append(text if text is not None else "<|MASK|>" if is_mask else f"[UNUSED{idx}]")
        plain = _UNUSED if text is None else _NORMAL
        kinds.append(_CONTROL if is_mask or added.get(idx) else _USER_DEFINED if idx in added else plain)
    return tokens, kinds


def _splitting_rule(stored: dict[str, Any] | None) -> str:
    for name, build in PRE_TOKENIZERS.items():
        if _as_json(build()) == stored:
            return name
    raise UnsupportedModelError(
        "the tokenizer's splitting rule has no name in GGUF", given=json.dumps(stored)[:80], fix="Export to hf"
    )


def _as_json(rule: pre_tokenizers.PreTokenizer) -> Any:
    return json.loads(rule.__getstate__())


def _list_tensors(source: ExportSource) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Our name, the file's name and the shape of every tensor."""
    tops = {theirs: name for name, theirs in TOP_NAMES.items()}
    parts = {theirs: name for name, theirs in LAYER_NAMES.items()}
    for ours, name in source.names.items():
        stem, _, kind = name.rpartition(".")
        if stem in tops:
            yield ours, f"{tops[stem]}.{kind}", source.shape(ours)
        else:
            number, _, part = stem.removeprefix("model.layers.").partition(".")
            yield ours, f"blk.{number}.{parts[part]}.{kind}", source.shape(ours)


def _values(source: ExportSource, ours: str) -> NDArray[np.float32]:
    values: NDArray[np.float32] = source.read(ours).to(torch.float32).numpy()
    heads = {"q_proj": source.config.num_heads, "k_proj": source.config.num_kv_heads}
    part = ours.split(".")[-2]
    interleaved = ARCHITECTURES[_architecture(source)][1]
    return interleave(values, heads[part]) if interleaved and part in heads else values


def _kind_of(shape: tuple[int, ...], kind: str) -> gguf.GGMLQuantizationType:
    wanted = KINDS[kind]
    if len(shape) == 1:
        return Kind.F32
    return wanted if shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0 else Kind.F16


def _num_bytes(shape: tuple[int, ...], kind: str) -> int:
    group, size = gguf.GGML_QUANT_SIZES[_kind_of(shape, kind)]
    return int(np.prod(shape)) // group * size


def check_gguf(path: Path) -> list[tuple[str, str]]:
    """What is wrong with a GGUF export, as (check, found) pairs; see `REASONS`.

    Raises:
        ModelError: the file cannot be read as a model at all.
    """
    content = read_gguf(path)
    metadata = {name: field.contents() for name, field in gguf.GGUFReader(str(path)).fields.items()}
    found = []
    mask, vocab = metadata.get("tokenizer.ggml.mask_token_id"), content.hf_config["vocab_size"]
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    if type(mask) is not int or not 0 <= mask < vocab:
        found.append(("mask id", f"tokenizer.ggml.mask_token_id is {mask!r}"))
    elif kinds[mask] != _CONTROL:
        found.append(("mask token", f"token {mask} has type {kinds[mask]}, not {_CONTROL}"))
    missing = [key for key in _OWN_KEYS if f"ar2diff.{key}" not in metadata]
    if missing:
        found.append(("settings", f"ar2diff.{missing[0]} is missing"))
    if metadata.get("diffusion.shift_logits") != metadata.get("ar2diff.shift_logits"):
        found.append(("shift", f"diffusion.shift_logits is {metadata.get('diffusion.shift_logits')!r}"))
    try:
        names = {name for name, _ in content.tensors()}
    except ModelError as error:
        return [*found, ("tensors", error.one_line())]
    lost = sorted(_expected_names(content.hf_config) - names)
    if lost:
        found.append(("tensors", f"{lost[0]} is missing"))
    return found


REASONS: dict[str, str] = {
    "mask id": "A binding has to know which token masks.",
    "mask token": "A mask that is no control token is printed in answers.",
    "settings": "A decode loop reads block size, shift and attention here.",
    "shift": "llama.cpp reads the shift under this key.",
    "tensors": "llama.cpp refuses a file that lacks one.",
}


def _expected_names(hf_config: dict[str, Any]) -> set[str]:
    return set(find_family(hf_config).tensor_names(read_decoder_config(hf_config)).values())
