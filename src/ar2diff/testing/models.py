"""Tiny random models with a byte tokenizer, made in milliseconds without a download.

Ids 0 to 255 are bytes; then come the control tokens below. The model is a llama.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.decoder import Decoder
from ar2diff.models.families.table import read_decoder_config
from ar2diff.models.loading import LoadedModel, named_tensors
from ar2diff.models.roots import root_of_tensors
from ar2diff.seeding import derive_seed
from ar2diff.tokenizer import Tokenizer

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|mask|>", "<|pad|>")
START_ID, END_ID, MASK_ID, PAD_ID = range(256, 260)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are the UTF-8 bytes, with four control tokens and a small chat template."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    backend = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    config = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    return Tokenizer(backend, eos_token_ids=[END_ID], chat_template=CHAT_TEMPLATE, config=config)


def tiny_config(**overrides: Any) -> DecoderConfig:
    """A llama of two layers with grouped queries and a tied head; any field of `DecoderConfig` may be overridden."""
    defaults: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_seq_len": 256,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tied_head": True,
    }
    return DecoderConfig(**{**defaults, **overrides})


def tiny_diffusion(**overrides: Any) -> DiffusionConfig:
    """Diffusion settings that fit `tiny_model`: blocks of four, shifted logits, causal clean stream."""
    defaults: dict[str, Any] = {
        "block_size": 4,
        "trained_block_sizes": (1, 2, 4),
        "shift_logits": True,
        "mask_token_id": MASK_ID,
        "clean_attention": "causal",
    }
    return DiffusionConfig(**{**defaults, **overrides})


def tiny_model(seed: int, *, diffusion: DiffusionConfig | None = None, **overrides: Any) -> LoadedModel:
    """A random llama, the same for the same seed; `diffusion` defaults to that of a parent (none).

    Args:
        seed: of the weights.
        diffusion: settings of a converted model, such as `tiny_diffusion()`.
        overrides: fields of `DecoderConfig` that a llama can have.
    """
    config = tiny_config(**overrides)
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(derive_seed("tiny model", seed))
    for name, parameter in decoder.named_parameters():
        scale = 0.5 if name == "embedding.weight" else parameter.shape[-1] ** -0.5
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data = 1 + 0.1 * noise if name.endswith("norm.weight") else noise
    return _wrap(decoder, diffusion)


def always_model(token_id: int, *, diffusion: DiffusionConfig | None = None, **overrides: Any) -> LoadedModel:
    """A model whose most likely token is `token_id` wherever and whatever it is asked."""

    def spoil(decoder: Decoder) -> None:
        # With silent layers and one constant embedding the final state is all ones, whatever the input.
        for name, parameter in decoder.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.zero_()
        decoder.embedding.weight.data.fill_(1.0)
        decoder.head.weight.data.mul_(0.01)
        decoder.head.weight.data[token_id] = 1.0

    return _spoiled(spoil, diffusion, {**overrides, "tied_head": False})


def nan_model(*, diffusion: DiffusionConfig | None = None, **overrides: Any) -> LoadedModel:
    """A model whose every logit is NaN."""
    return _spoiled(lambda decoder: decoder.final_norm.weight.data.fill_(float("nan")), diffusion, overrides)


def llama_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a llama with this shape."""
    stored: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_head,
        "eos_token_id": END_ID,
    }
    assert read_decoder_config(stored) == config, "tiny models are llamas"
    return stored


def _spoiled(
    spoil: Callable[[Decoder], Any], diffusion: DiffusionConfig | None, overrides: dict[str, Any]
) -> LoadedModel:
    loaded = tiny_model(0, diffusion=diffusion, **overrides)
    spoil(loaded.decoder)
    return dataclasses.replace(loaded, tensor_root=_root(loaded.decoder, loaded.hf_config))


def _wrap(decoder: Decoder, diffusion: DiffusionConfig | None) -> LoadedModel:
    hf_config = llama_json(decoder.config)
    return LoadedModel(
        decoder=decoder,
        config=decoder.config,
        tokenizer=byte_tokenizer(),
        diffusion=diffusion,
        tensor_root=_root(decoder, hf_config),
        hf_config=hf_config,
    )


def _root(decoder: Decoder, hf_config: dict[str, Any]) -> str:
    return root_of_tensors(named_tensors(decoder, hf_config))


def _byte_alphabet() -> list[str]:
    # The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for code points from 256 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
