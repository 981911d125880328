"""The tokenizer inside a GGUF file, rebuilt as a byte-level BPE with the model's own splitting rule."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from ar2diff.errors import ModelError, UnsupportedModelError
from ar2diff.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_FETCH = "Fetch the file again"

# The published splitting patterns of the model families; they are data, each defined by its tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# `tokenizer.ggml.pre` to the pre-tokenizer of the family's tokenizer.json.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "gpt2": _byte_level,
    "smollm": _digits_then_byte_level,
    "llama-bpe": lambda: _split_then_bytes(_LLAMA3_SPLIT),
    "llama3": lambda: _split_then_bytes(_LLAMA3_SPLIT),
    "qwen2": lambda: _split_then_bytes(_QWEN2_SPLIT),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's `tokenizer.ggml.*` metadata describes.

    Raises:
        ModelError: metadata is missing or contradicts itself.
        UnsupportedModelError: the tokenizer is no byte-level BPE, or its splitting rule is unknown.
    """
    if (kind := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise UnsupportedModelError(
            "this GGUF tokenizer is not supported", given=str(kind), fix="Use a byte-level BPE"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError("this GGUF splitting rule (tokenizer.ggml.pre) is not supported", given=str(pre))
    tokens = _read_list(metadata, "tokens", str)
    backend = _build_backend(tokens, _read_merges(metadata))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    _add_control_tokens(backend, tokens, _read_list(metadata, "token_type", int))
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError("the GGUF chat template is no text", given=repr(template)[:80], fix=_FETCH)
    config = {
        name: tokens[idx]
        for name in ("bos_token", "eos_token", "pad_token")
        if isinstance(idx := metadata.get(f"tokenizer.ggml.{_GGUF_NAMES[name]}_token_id"), int)
        and 0 <= idx < len(tokens)
    }
    return Tokenizer(backend, eos_token_ids=_read_end(metadata, tokens), chat_template=template, config=config)


_GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}


def _read_list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """A list of the tokenizer's metadata; an absent one is empty."""
    value = metadata.get(f"tokenizer.ggml.{name}") or []
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise ModelError(f"GGUF metadata tokenizer.ggml.{name} has the wrong type", fix=_FETCH)
    return value


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in _read_list(metadata, "merges", str):
        left, found, right = line.partition(" ")
        if not found or not left or not right or " " in right:
            raise ModelError("a GGUF tokenizer merge is not a pair", given=repr(line), fix=_FETCH)
        merges.append((left, right))
    return merges


def _build_backend(tokens: list[str], merges: list[tuple[str, str]]) -> Backend:
    vocabulary = {token: idx for idx, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise ModelError("the GGUF tokenizer has no tokens or the same one twice", given=len(tokens), fix=_FETCH)
    try:
        return Backend(BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the GGUF tokenizer contradicts itself: {error}", fix=_FETCH) from None


def _add_control_tokens(backend: Backend, tokens: list[str], kinds: list[int]) -> None:
    if len(kinds) != len(tokens):
        raise ModelError(
            "the GGUF tokenizer has not one type per token", given=f"{len(kinds)}, {len(tokens)}", fix=_FETCH
        )
    controls = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL
    ]
    plain = [
        AddedToken(t, special=False, normalized=False)
        for t, k in zip(tokens, kinds, strict=True)
        if k == _USER_DEFINED
    ]
    backend.add_special_tokens(controls)
    backend.add_tokens(plain)


def _read_end(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    found = [idx for idx in ids if isinstance(idx, int)]
    if not found or any(not 0 <= idx < len(tokens) for idx in found):
        raise ModelError("the GGUF metadata names no valid end token", given=str(found), fix=_FETCH)
    return found
