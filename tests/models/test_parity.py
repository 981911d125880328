"""Every family's decoder equals its transformers twin: whole sequences, cached decoding, and after a save."""

import json
import math

import pytest
import torch
import transformers

from ar2diff.attention.kv_cache import KVCache
from ar2diff.attention.ops import causal_attend
from ar2diff.models.loading import load_model, save_model
from ar2diff.testing.models import byte_tokenizer

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# With head size 8 the wavelengths are 6, 53, 444 and 3735: one is kept, one blended, two stretched.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 20000.0}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 5.0,
}
CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("Llama", {"num_key_value_heads": 1}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 12}),
    "llama-scaled-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN_ROPE}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": PLAIN_ROPE}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": PLAIN_ROPE}),
    "qwen3-biases": ("Qwen3", {"head_dim": 8, "attention_bias": True, "rope_parameters": PLAIN_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None, "rope_parameters": PLAIN_ROPE}),
    "mistral-wide-window": ("Mistral", {"sliding_window": 128, "rope_parameters": PLAIN_ROPE}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "rope_parameters": PLAIN_ROPE}),
    "smollm3-interval": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "olmo2": ("Olmo2", {"rope_parameters": PLAIN_ROPE}),
    "olmo2-tied": ("Olmo2", {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": PLAIN_ROPE}),
    "granite": ("Granite", {**GRANITE, "rope_parameters": PLAIN_ROPE}),
    "granite-tied": ("Granite", {**GRANITE, "tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True}),
    "gemma3_text": (
        "Gemma3Text",
        {"head_dim": 8, "query_pre_attn_scalar": 24, "layer_types": ["full_attention"] * 3},
    ),
}


def build_twin(case, seed):
    """A transformers model with every parameter random, norms and biases included."""
    family, overrides = CASES[case]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **overrides})
    name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    twin = getattr(transformers, name)(config).eval().float()
    randomise(twin, seed)
    return twin


def randomise(twin, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in twin.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (1 if "norm" in name else 0) + noise * (0.3 if parameter.ndim == 1 else 0.15)


def store(twin, folder):
    twin.save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


def random_ids(seed, length=37):
    return torch.randint(0, SHAPE["vocab_size"], (2, length), generator=torch.Generator().manual_seed(seed))


def whole_logits(loaded, ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = loaded.decoder(ids, positions, causal_attend(loaded.config.softmax_scale))
    return loaded.decoder.logits(hidden)


def cached_logits(loaded, ids, prefill):
    config = loaded.config
    cache = KVCache(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        softmax_scale=config.softmax_scale,
        capacity=ids.shape[1],
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pieces, start = [], 0
    for end in range(prefill, ids.shape[1] + 1):
        count = end - start
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        positions = torch.arange(start, end)[None]
        hidden = loaded.decoder(ids[:1, start:end], positions, cache.attend_with(causal))
        cache.commit(count)
        pieces.append(loaded.decoder.logits(hidden))
        start = end
    return torch.cat(pieces, dim=1)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_decoder_computes_its_twins_logits(case, seed, tmp_path):
    twin = build_twin(case, seed)
    loaded = load_model(store(twin, tmp_path))
    ids = random_ids(seed)
    expected = twin(ids).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(whole_logits(loaded, ids), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cached_logits(loaded, ids, prefill=9), expected[:1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_is_read_by_transformers_as_the_same_model(case, tmp_path):
    twin = build_twin(case, 3)
    loaded = load_model(store(twin, tmp_path / "first"))
    save_model(tmp_path / "second", loaded, None)
    again = type(twin).from_pretrained(tmp_path / "second").eval()
    ids = random_ids(3)
    assert torch.equal(again(ids).logits, twin(ids).logits)


@pytest.mark.parametrize("case", ["llama", "llama-scaled-rope", "qwen2", "qwen3", "granite"])
def test_config_files_of_older_transformers_mean_the_same(case, tmp_path):
    folder = store(build_twin(case, 0), tmp_path)
    new = load_model(folder).config
    stored = json.loads((folder / "config.json").read_text())
    rope = stored.pop("rope_parameters")
    stored["rope_theta"] = rope.pop("rope_theta")
    stored["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (folder / "config.json").write_text(json.dumps(stored))
    assert load_model(folder).config == new


@pytest.mark.parametrize("tied", [True, False])
def test_minicpm_equals_granite_with_its_scales_written_out(tied, tmp_path):
    """scale_emb, scale_depth / sqrt(layers) and hidden / dim_model_base are Granite's multipliers in other words."""
    scales = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / math.sqrt(SHAPE["num_hidden_layers"]),
        "logits_scaling": SHAPE["hidden_size"] / 8,
        "attention_multiplier": (SHAPE["hidden_size"] // SHAPE["num_attention_heads"]) ** -0.5,
    }
    config = transformers.GraniteConfig(**{**SHAPE, **scales, "tie_word_embeddings": tied})
    twin = transformers.GraniteForCausalLM(config).eval()
    randomise(twin, 5)
    store(twin, tmp_path)
    stored = {key: SHAPE[key] for key in SHAPE if not key.endswith("_token_id")} | {
        "model_type": "minicpm",
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"},
        "hidden_act": "silu",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 8,
        "rope_scaling": None,
        **({} if tied else {"tie_word_embeddings": False}),
    }
    (tmp_path / "config.json").write_text(json.dumps(stored))
    ids = random_ids(5)
    torch.testing.assert_close(whole_logits(load_model(tmp_path), ids), twin(ids).logits, atol=1e-4, rtol=1e-4)
