"""A GGUF file loads as the model it was written from."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ar2diff.attention.ops import causal_attend
from ar2diff.errors import Ar2diffError, ModelError, UnsupportedModelError
from ar2diff.models.decoder import Decoder
from ar2diff.models.gguf_file import undo_interleave
from ar2diff.models.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from ar2diff.models.loading import load_model, load_tokenizer, named_tensors, save_model
from ar2diff.testing.models import END_ID, byte_tokenizer, llama_json, tiny_config, tiny_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, idx, part = stem.split(".", 3)
        return f"blk.{idx}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave(rows, num_heads):
    """The order that llama.cpp stores: in each head, row i of the first half is followed by row i of the second."""
    heads = np.split(rows, num_heads)
    return np.stack([row for head in heads for pair in zip(*np.split(head, 2), strict=True) for row in pair])


def metadata_of(model):
    config = model.config
    tokens = [model.tokenizer.id_to_token(idx) for idx in range(config.vocab_size)]
    return {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_seq_len,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.rope.dimension_count": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 4,
        "tokenizer.ggml.eos_token_id": END_ID,
        "tokenizer.chat_template": model.tokenizer.chat_template,
    }


def write_gguf(path, model, *, quantise=None, architecture="llama", drop=(), extra=None, **changes):
    """Write `model` as llama.cpp's converter lays it out; `changes` replace metadata (dots as two underscores)."""
    writer = gguf.GGUFWriter(path, architecture)
    metadata = {**metadata_of(model), **{key.replace("__", "."): value for key, value in changes.items()}}
    for key, value in metadata.items():
        if key in drop or value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    heads = {"q_proj": model.config.num_heads, "k_proj": model.config.num_kv_heads}
    for name, tensor in named_tensors(model.decoder, model.hf_config).items():
        values = tensor.detach().numpy()
        part = name.split(".")[-2]
        if part in heads and architecture == "llama":
            values = interleave(values, heads[part])
        if quantise is None or values.ndim == 1:
            writer.add_tensor(gguf_name(name), values.copy())
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, quantise), raw_dtype=quantise)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(loaded):
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        hidden = loaded.decoder(ids, ids, causal_attend(loaded.config.softmax_scale))
        return loaded.decoder.logits(hidden)


@pytest.mark.parametrize("overrides", [{}, {"tied_head": False}, {"num_kv_heads": 4}, {"qkv_bias": True}])
def test_a_gguf_file_loads_as_the_model_it_was_written_from(overrides, tmp_path):
    if "qkv_bias" in overrides:
        overrides = {**overrides, "output_bias": True}
    model = tiny_model(0, **overrides)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model))
    assert loaded.config == model.config
    assert loaded.tensor_root == model.tensor_root
    assert torch.equal(logits(loaded), logits(model))


def test_a_gguf_file_saved_as_a_folder_loads_bit_equal(tmp_path):
    loaded = load_model(write_gguf(tmp_path / "m.gguf", tiny_model(0)))
    root = save_model(tmp_path / "folder", loaded, None)
    again = load_model(tmp_path / "folder")
    assert root == loaded.tensor_root == again.tensor_root
    assert again.config == loaded.config
    messages = [{"role": "user", "content": "hello <|im_end|>"}]
    assert again.tokenizer.encode_chat(messages, add_generation_prompt=True) == loaded.tokenizer.encode_chat(
        messages, add_generation_prompt=True
    )
    assert again.tokenizer.eos_token_ids == loaded.tokenizer.eos_token_ids == (END_ID,)


def test_a_tokenizer_loads_without_the_weights(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_model(0), llama__block_count=9)
    load_tokenizer(path).save(tmp_path / "folder")
    for tokenizer in (load_tokenizer(path), load_tokenizer(tmp_path / "folder")):
        assert tokenizer.encode("hé") == byte_tokenizer().encode("hé")
        assert tokenizer.eos_token_ids == (END_ID,)


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "BF16"])
def test_quantised_weights_come_back_within_their_precision(kind, tmp_path):
    model = tiny_model(0, intermediate_size=64)
    quantise = gguf.GGMLQuantizationType[kind]
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, quantise=quantise))
    torch.testing.assert_close(loaded.decoder.embedding.weight, model.decoder.embedding.weight, atol=0.02, rtol=0.01)
    assert (logits(loaded) - logits(model)).abs().max() < 0.2 * logits(model).std()


def qwen3_model():
    config = tiny_config(model_type="qwen3", qk_norm="head", tied_head=False)
    hf_config = {**llama_json(tiny_config(tied_head=False)), "model_type": "qwen3"}
    decoder = Decoder(config)
    for parameter in decoder.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return dataclasses.replace(tiny_model(0), decoder=decoder, config=config, hf_config=hf_config)


def test_qwen_rows_are_not_reordered(tmp_path):
    model = qwen3_model()
    renamed = {key.replace("llama.", "qwen3."): value for key, value in metadata_of(model).items()}
    dropped = [key for key in metadata_of(model) if key.startswith("llama.")]
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, architecture="qwen3", drop=dropped, **renamed))
    assert loaded.config == model.config
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(("num_heads", "half"), [(1, 1), (2, 3), (4, 4)])
def test_undoing_the_interleaving_is_its_inverse(num_heads, half):
    rows = np.random.default_rng(0).standard_normal((num_heads * half * 2, 5)).astype(np.float32)
    assert np.array_equal(undo_interleave(interleave(rows, num_heads), num_heads), rows)
    assert np.array_equal(undo_interleave(interleave(rows[:, 0], num_heads), num_heads), rows[:, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "architecture"),
        ({"llama__expert_count": 8}, "expert_count"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.type"),
        ({"llama__attention__sliding_window": 64}, "sliding_window"),
        ({"llama__rope__dimension_count": 4, "llama__attention__key_length": 8}, "rope.dimension_count"),
        ({"llama__attention__key_length": 8, "llama__attention__value_length": 4}, "value_length"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer"),
        ({"tokenizer__ggml__pre": "deepseek-coder"}, "tokenizer.ggml.pre"),
        ({"drop": ["tokenizer.ggml.pre"]}, "tokenizer.ggml.pre"),
    ],
)
def test_an_unsupported_gguf_feature_is_named(changes, message, tmp_path):
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(write_gguf(tmp_path / "m.gguf", tiny_model(0), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ["llama.embedding_length"]}, "embedding_length"),
        ({"drop": ["tokenizer.ggml.tokens"]}, "tokenizer.ggml.tokens"),
        ({"drop": ["tokenizer.ggml.eos_token_id"]}, "end token"),
        ({"drop": ["tokenizer.ggml.token_type"]}, "one type per token"),
        ({"tokenizer__ggml__eos_token_id": 5000}, "end token"),
        ({"tokenizer__ggml__merges": ["he"]}, "merge"),
        ({"tokenizer__ggml__merges": ["h nowhere"]}, "contradicts itself"),
        ({"tokenizer__ggml__tokens": ["a"] * 260}, "same one twice"),
        ({"llama__block_count": "2"}, "block_count has the wrong type"),
        ({"llama__rope__freq_base": "x"}, "freq_base has the wrong type"),
        ({"tokenizer__ggml__merges": [1, 2]}, "merges has the wrong type"),
        ({"tokenizer__ggml__merges": 3}, "merges has the wrong type"),
        ({"tokenizer__ggml__token_type": 3}, "token_type has the wrong type"),
        ({"tokenizer__ggml__pre": ["gpt-2"]}, "tokenizer.ggml.pre"),
        ({"tokenizer__chat_template": 5}, "chat template is no text"),
        ({"llama__block_count": 2**31 - 1}, "num_layers must be at most"),
        ({"llama__attention__head_count_kv": 3}, "num_kv_heads"),
        ({"llama__block_count": 3}, "is missing"),
    ],
)
def test_an_impossible_gguf_file_is_named(changes, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        load_model(write_gguf(tmp_path / "m.gguf", tiny_model(0), **changes))


def test_weights_that_are_not_finite_or_have_no_place_are_named(tmp_path):
    model = tiny_model(0)
    model.decoder.final_norm.weight.data[0] = float("nan")
    with pytest.raises(ModelError, match=r"output_norm\.weight holds values"):
        load_model(write_gguf(tmp_path / "nan.gguf", model))
    path = tmp_path / "odd.gguf"
    write_gguf(path, tiny_model(0))
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(UnsupportedModelError, match="ffn_xx"):
        load_model(path)


def test_a_quantisation_that_cannot_be_undone_is_named(tmp_path):
    extra = {"blk.0.attn_q.bias": np.zeros(32, dtype=np.int8)}
    with pytest.raises(UnsupportedModelError, match=r"attn_q\.bias has an unsupported quantisation.*I8"):
        load_model(write_gguf(tmp_path / "m.gguf", tiny_model(0), extra=extra))


def test_rope_factors_stored_as_a_tensor_are_refused(tmp_path):
    extra = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        load_model(write_gguf(tmp_path / "m.gguf", tiny_model(0), extra=extra))


def test_a_metadata_file_without_its_text_is_named(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="damaged"):
        load_model(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", tiny_model(0)).read_bytes()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_or_flipped_file_fails_as_a_model_error_if_at_all(data, whole_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    raw = bytearray(whole_file)
    position = data.draw(st.integers(0, 12000 if data.draw(st.booleans()) else len(raw) - 1))
    if data.draw(st.booleans()):
        del raw[position:]
    else:
        raw[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    try:
        load_model(path)
    except Ar2diffError:
        return
    assert len(raw) == len(whole_file)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "ab 123 c's", ["ab", "Ġ", "1", "2", "3", "Ġc", "'s"]),
        ("gpt-2", "ab 123 c's", ["ab", "Ġ123", "Ġc", "'s"]),
        ("llama-bpe", "ab 12345 C'S", ["ab", "Ġ", "123", "45", "ĠC", "'S"]),
        ("qwen2", "ab 123", ["ab", "Ġ", "1", "2", "3"]),
    ],
)
def test_each_splitting_rule_cuts_numbers_and_words_its_own_way(pre, text, pieces):
    assert [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str(text)] == pieces


def test_merges_control_and_user_tokens_are_understood():
    tiny = byte_tokenizer()
    tokens = [tiny.id_to_token(idx) for idx in range(256)] + ["<|im_end|>", "<think>", "he"]
    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 256 + [3, 4, 1],
            "tokenizer.ggml.merges": ["h e"],
            "tokenizer.ggml.eos_token_id": 256,
            "tokenizer.ggml.eot_token_id": 257,
        }
    )
    assert tokenizer.encode("he<think>") == [258, 257]
    assert tokenizer.special_ids == {256}
    assert tokenizer.eos_token_ids == (256, 257)
    assert tokenizer.chat_template is None
    assert json.dumps(tokenizer.decode([258, 256])) == '"he"'
