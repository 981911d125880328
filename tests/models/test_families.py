"""What each family's config.json means, and what of it is refused."""

import pytest

from ar2diff.errors import ModelError, UnsupportedModelError
from ar2diff.models.decoder import Decoder
from ar2diff.models.families.table import FAMILIES, find_family, read_decoder_config
from ar2diff.testing.models import llama_json, tiny_config

EXTRAS = {
    "gemma3_text": {
        "layer_types": ["full_attention"] * 2,
        "query_pre_attn_scalar": 8,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "granite": {
        "embedding_multiplier": 12,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.2,
        "logits_scaling": 8,
    },
    "minicpm": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8},
    "mistral": {"sliding_window": None},
}


def stored(family, **changes):
    whole = {**llama_json(tiny_config()), "model_type": family, **EXTRAS.get(family, {}), **changes}
    return {key: value for key, value in whole.items() if value != "absent"}


def read(family, **changes):
    return read_decoder_config(stored(family, **changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_names_every_tensor_of_its_decoder_once(family):
    config = read(family)
    names = find_family(stored(family)).tensor_names(config)
    assert set(names) == set(Decoder(config).state_dict())
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "max_position_embeddings", "rms_norm_eps"])
def test_every_family_names_a_missing_key(family, key):
    with pytest.raises(ModelError, match=key):
        read(family, **{key: "absent"})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gemma3_text", "query_pre_attn_scalar"),
        ("granite", "logits_scaling"),
        ("granite", "attention_multiplier"),
        ("granite", "embedding_multiplier"),
        ("granite", "residual_multiplier"),
        ("minicpm", "scale_emb"),
        ("minicpm", "scale_depth"),
        ("minicpm", "dim_model_base"),
        ("qwen3", "head_dim"),
        ("qwen2", "rope_theta"),
    ],
)
def test_a_number_that_makes_the_family_is_never_guessed(family, key):
    with pytest.raises(ModelError, match=key):
        read(family, **{key: "absent"})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {"query_pre_attn_scalar": 0}),
        ("granite", {"logits_scaling": 0}),
        ("granite", {"residual_multiplier": -1}),
        ("minicpm", {"dim_model_base": 0}),
        ("minicpm", {"num_hidden_layers": 0}),
        ("minicpm", {"scale_emb": "12"}),
        ("smollm3", {"no_rope_layers": [1]}),
        ("smollm3", {"no_rope_layers": [1, 2]}),
        ("smollm3", {"no_rope_layer_interval": 0}),
        ("smollm3", {"attention_bias": "yes"}),
        ("llama", {"rope_scaling": {"rope_type": 3}}),
    ],
)
def test_an_impossible_value_is_a_model_error(family, changes):
    with pytest.raises(ModelError, match="config"):
        read(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ("gemma3_text", {"layer_types": "absent"}, "sliding_window"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("minicpm", {"sparse_config": {"kernel_size": 32}}, "sparse_config"),
        ("minicpm", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ("minicpm", {"num_experts": 8}, "num_experts"),
        ("mistral", {"sliding_window": 64}, "sliding_window"),
        ("mistral", {"sliding_window": "absent", "max_position_embeddings": 8192}, "sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_window"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ("olmo2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ],
)
def test_a_feature_that_would_be_approximated_is_refused(family, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 256}),
        ("mistral", {"sliding_window": 256}),
        ("mistral", {"sliding_window": "absent"}),
        ("llama", {"layer_types": ["full_attention"] * 2, "sliding_window": 64}),
        ("minicpm", {"auto_map": {"AutoModel": "x.Y"}, "num_experts": 0}),
    ],
)
def test_a_window_or_option_without_effect_is_no_reason_to_refuse(family, changes):
    assert read(family, **changes) == read(family)


def test_rotary_layers_follow_the_list_or_the_interval():
    assert read("smollm3", no_rope_layers=[0, 1, 1]).rope_layers == (False, True)
    assert read("smollm3", num_hidden_layers=8).rope_layers == (True, True, True, False) * 2
    assert read("smollm3", num_hidden_layers=4, no_rope_layer_interval=2).rope_layers == (True, False) * 2


@pytest.mark.parametrize(("family", "tied"), [(f, f in ("smollm3", "minicpm", "gemma3_text")) for f in FAMILIES])
def test_heads_are_tied_by_default_where_the_familys_own_code_ties_them(family, tied):
    assert read(family, tie_word_embeddings="absent").tied_head is tied


def test_a_text_value_of_the_wrong_type_is_named():
    with pytest.raises(ModelError, match="rope_theta"):
        read("llama", rope_theta=[10000])
    with pytest.raises(ModelError, match="rope_parameters"):
        read("llama", rope_parameters="default")


def test_first_generation_llamas_rotate_with_ten_thousand():
    assert read("llama", rope_theta="absent").rope_theta == 10000.0
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 7.0}}
    assert read("gemma3_text", rope_parameters=nested).rope_theta == 7.0
