"""The shipped test models do what their names say."""

import pytest
import torch

from ar2diff.attention.ops import causal_attend
from ar2diff.errors import ConfigError
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.loading import load_model, save_model
from ar2diff.testing.models import (
    END_ID,
    MASK_ID,
    always_model,
    byte_tokenizer,
    nan_model,
    tiny_config,
    tiny_diffusion,
    tiny_model,
)


def logits(loaded, ids):
    positions = torch.arange(ids.shape[1])[None]
    with torch.inference_mode():
        hidden = loaded.decoder(ids, positions, causal_attend(loaded.config.softmax_scale))
        return loaded.decoder.logits(hidden)


IDS = torch.arange(0, 250, 5)[None]


def test_a_seed_names_one_model():
    assert tiny_model(3).tensor_root == tiny_model(3).tensor_root != tiny_model(4).tensor_root


def test_a_tiny_model_answers_differently_to_different_inputs():
    best = logits(tiny_model(0), IDS).argmax(-1)
    assert len(best.unique()) > 10


@pytest.mark.parametrize("token_id", [END_ID, MASK_ID, 65])
def test_an_always_model_prefers_its_token_everywhere(token_id, tmp_path):
    model = always_model(token_id, diffusion=tiny_diffusion())
    assert (logits(model, IDS).argmax(-1) == token_id).all()
    assert save_model(tmp_path, model, model.diffusion) == model.tensor_root == load_model(tmp_path).tensor_root


def test_a_nan_model_has_no_finite_logit():
    assert logits(nan_model(), IDS).isnan().all()


def test_overrides_that_no_llama_has_are_our_own_mistake():
    with pytest.raises(AssertionError, match="llamas"):
        tiny_model(0, qk_norm="head")


def test_the_byte_tokenizers_ids_are_bytes():
    tokenizer = byte_tokenizer()
    text = bytes(range(128)).decode() + "é€😀"
    assert tokenizer.encode(text) == list(text.encode())


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_layers": 0},
        {"vocab_size": -1},
        {"num_kv_heads": 3},
        {"head_dim": 7},
        {"rope_layers": (True,)},
        {"norm_eps": 0.0},
        {"rope_theta": 0.0},
        {"residual_scale": float("nan")},
    ],
)
def test_an_impossible_decoder_config_is_refused(overrides):
    with pytest.raises(ConfigError, match=next(iter(overrides))):
        tiny_config(**overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"block_size": 0},
        {"block_size": 8},
        {"trained_block_sizes": (0, 4)},
        {"trained_block_sizes": (4, 2)},
        {"mask_token_id": -1},
        {"clean_attention": "full"},
    ],
)
def test_impossible_diffusion_settings_are_refused(overrides):
    with pytest.raises(ConfigError, match=r"block|mask_token_id|clean_attention"):
        tiny_diffusion(**overrides)


def test_diffusion_settings_survive_json():
    settings = tiny_diffusion(shift_logits=False, clean_attention="block")
    assert DiffusionConfig.from_json(settings.as_json()) == settings


def test_the_softmax_scale_is_one_over_the_root_of_the_head_size_unless_given():
    assert tiny_config(head_dim=16).softmax_scale == 0.25
    assert tiny_config(attention_scale=0.7).softmax_scale == 0.7
    assert isinstance(tiny_config(), DecoderConfig)
