"""A model folder loads exactly as stored, or not at all with an error that names what is wrong."""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ar2diff.errors import Ar2diffError, ModelError, SpaceError, UnsupportedModelError
from ar2diff.files import PARTIAL_MARK
from ar2diff.models.loading import load_model, named_tensors, save_model
from ar2diff.models.roots import digest_tensor, root_of_tensors
from ar2diff.testing.models import nan_model, tiny_diffusion, tiny_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    save_model(folder, tiny_model(0), None)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def rewrite_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def rewrite_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite_header(folder, change):
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = change(raw[8 : 8 + length].decode()).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def shard(folder, places):
    """Split the single file: `places` says into which shards a tensor goes (default the first)."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = ["model-1.safetensors", "model-2.safetensors"]
    for idx, name in enumerate(names):
        save_file({key: t for key, t in tensors.items() if idx in places.get(key, (0,))}, folder / name)
    index = {key: names[places.get(key, (0,))[0]] for key in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


# What loads, loads exactly.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("diffusion", [None, tiny_diffusion()])
def test_a_saved_model_loads_back_bit_equal(tied, diffusion, tmp_path):
    model = tiny_model(1, tied_head=tied, qkv_bias=True, output_bias=True, mlp_bias=True)
    root = save_model(tmp_path, model, diffusion)
    again = load_model(tmp_path)
    assert again.tensor_root == root == model.tensor_root
    assert (again.config, again.diffusion) == (model.config, diffusion)
    state = again.decoder.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.decoder.state_dict().items())
    assert torch.equal(again.decoder.inverse_frequencies, model.decoder.inverse_frequencies)
    save_model(tmp_path / "again", again, again.diffusion)
    for path in tmp_path.glob("*.*"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_saved_files_are_readable_by_others_and_leave_nothing_behind(original):
    assert (original / WEIGHTS).stat().st_mode & 0o777 == 0o644
    assert not list(original.glob(f"*{PARTIAL_MARK}*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_as_asked_and_the_root_stays_that_of_the_file(dtype, folder):
    rewrite_weights(folder, lambda tensors: tensors.update({k: t.bfloat16() for k, t in tensors.items()}))
    stored = load_file(folder / WEIGHTS)
    loaded = load_model(folder, dtype=dtype)
    live = named_tensors(loaded.decoder, loaded.hf_config)
    assert all(torch.equal(live[name], tensor.to(dtype)) for name, tensor in stored.items())
    assert loaded.tensor_root == root_of_tensors(stored)
    assert (root_of_tensors(live) == loaded.tensor_root) == (dtype == torch.bfloat16)


def test_shards_load_as_the_single_file_does(folder, original):
    shard(folder, {NORM: (1,), EMBEDDING: (1,)})
    assert load_model(folder).tensor_root == load_model(original).tensor_root


def test_the_root_depends_on_name_dtype_shape_and_bytes_but_not_on_order():
    tensors = {"a": torch.arange(4.0), "b": torch.zeros(2, 2)}
    root = root_of_tensors(tensors)
    assert root_of_tensors(dict(reversed(tensors.items()))) == root
    others = [
        {**tensors, "c": torch.zeros(1)},
        {"a": tensors["a"], "c": tensors["b"]},
        {**tensors, "b": torch.zeros(4)},
        {**tensors, "b": torch.zeros(2, 2, dtype=torch.int32)},
        {**tensors, "b": torch.tensor([[0.0, 0.0], [0.0, -0.0]])},
    ]
    assert len({root, *map(root_of_tensors, others)}) == 6
    assert digest_tensor("x", torch.ones(3, 2).T) == digest_tensor("x", torch.ones(2, 3))
    assert digest_tensor("s", torch.tensor(1.0)).shape == ()
    with pytest.raises(ModelError, match="dtype"):
        digest_tensor("x", torch.zeros(1, dtype=torch.complex64))


def test_running_weights_do_not_change_when_their_file_does(folder):
    loaded = load_model(folder)
    before = loaded.decoder.embedding.weight.clone()
    with (folder / WEIGHTS).open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"\0" * 8192)
    assert torch.equal(loaded.decoder.embedding.weight, before)


def test_a_tied_head_may_be_stored_again_but_only_as_the_same_bytes(folder):
    rewrite_weights(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    assert not hasattr(load_model(folder).decoder, "head")
    rewrite_weights(folder, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
        load_model(folder)


# What does not fit is named.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), "model.norm.weight is missing"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(1)}), "model.extra.weight has no place"),
        (lambda t: t.update({NORM: torch.zeros(33)}), "model.norm.weight must have shape"),
        (lambda t: t[NORM].__setitem__(3, float("nan")), "model.norm.weight holds values that are not finite"),
        (lambda t: t[EMBEDDING].__setitem__((0, 0), float("inf")), "embed_tokens.weight holds values"),
        (lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int8)}), "model.norm.weight is stored in an unsup"),
        (lambda t: t.update({"../../etc/x": torch.zeros(1)}), "a name that no model uses"),
        (lambda t: t.update({"a/b": torch.zeros(1)}), "a name that no model uses"),
        (lambda t: t.update({"": torch.zeros(1)}), "a name that no model uses"),
    ],
)
def test_a_wrong_tensor_is_named(change, message, folder):
    rewrite_weights(folder, change)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_a_value_that_overflows_the_asked_dtype_is_named(folder):
    rewrite_weights(folder, lambda t: t[NORM].fill_(1e6))
    load_model(folder)
    with pytest.raises(ModelError, match=r"model\.norm\.weight does not fit into torch\.float16"):
        load_model(folder, dtype=torch.float16)


def test_a_doubled_key_in_a_header_is_named(folder):
    rewrite_header(folder, lambda text: '{"model.norm.weight": {},' + text[1:])
    with pytest.raises(ModelError, match=r"model\.norm\.weight is twice"):
        load_model(folder)


@pytest.mark.parametrize("header", ["[]", "{", "[" * 5000, '{"a": 1}', '{"a": {"dtype": "F32"}}', "\ud800"])
def test_a_damaged_header_is_a_model_error(header, folder):
    raw = header.encode("utf-8", "surrogatepass")
    (folder / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(ModelError):
        load_model(folder)


def test_contradictions_between_shards_and_index_are_named(original, tmp_path):
    def sharded(name, places):
        folder = shutil.copytree(original, tmp_path / name)
        return folder, shard(folder, places)

    folder, _ = sharded("doubled", {NORM: (0, 1), EMBEDDING: (1,)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in two shards"):
        load_model(folder)
    folder, index = sharded("misplaced", {NORM: (1,), EMBEDDING: (1,)})
    (folder / INDEX).write_text(json.dumps({"weight_map": {**index, NORM: "model-1.safetensors"}}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is not where the index says"):
        load_model(folder)
    folder, index = sharded("lost", {NORM: (1,)})
    (folder / INDEX).write_text(json.dumps({"weight_map": {**index, "model.ghost": "model-1.safetensors"}}))
    with pytest.raises(ModelError, match=r"model\.ghost is in the index"):
        load_model(folder)
    folder, _ = sharded("missing", {NORM: (1,)})
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize("place", ["../model.safetensors", "/x.safetensors", "a/b.safetensors", "model.bin", 3])
def test_an_index_never_leads_out_of_the_folder(place, folder):
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: place}}))
    with pytest.raises(ModelError, match="outside the folder"):
        load_model(folder)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "{"])
def test_a_damaged_index_is_named(content, folder):
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(content)
    with pytest.raises(ModelError, match="index"):
        load_model(folder)


def test_pickles_are_never_read_and_ambiguity_is_refused(folder):
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    load_model(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="both"):
        load_model(folder)
    (folder / INDEX).unlink()
    (folder / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModelError, match="pickle is never read"):
        load_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_model(folder)
    with pytest.raises(ModelError, match="no model folder"):
        load_model(folder / "nowhere")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_file_never_loads(data, original, tmp_path_factory):
    folder = shutil.copytree(original, tmp_path_factory.mktemp("cut") / "model")
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(ModelError):
        load_model(folder)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_changes_the_root_or_touches_no_tensor(data, original, tmp_path_factory):
    folder = shutil.copytree(original, tmp_path_factory.mktemp("flip") / "model")
    name = data.draw(st.sampled_from([WEIGHTS, "config.json", "tokenizer_config.json"]))
    raw = bytearray((folder / name).read_bytes())
    header_end = 8 + int.from_bytes(raw[:8], "little") if name == WEIGHTS else len(raw)
    in_header = data.draw(st.booleans())
    position = data.draw(st.integers(0, header_end - 1) if in_header else st.integers(0, len(raw) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    (folder / name).write_bytes(raw)
    try:
        loaded = load_model(folder)
    except Ar2diffError:
        return
    reference = load_model(original)
    assert position < header_end or loaded.tensor_root != reference.tensor_root


# config.json.


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
    ],
)
@pytest.mark.parametrize("value", [None, [], {}, True])
def test_a_missing_or_mistyped_key_is_named(key, value, folder):
    rewrite_config(folder, **{key: value})
    with pytest.raises(ModelError, match=f"config.json.*{key}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_experts": 8}, "num_experts"),
        ({"text_config": {"model_type": "llama"}}, "text_config"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type linear"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu2"}, "hidden_act=relu2"),
        ({"model_type": "mamba"}, "model_type"),
    ],
)
def test_an_unsupported_feature_is_named_and_never_approximated(changes, message, folder):
    rewrite_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(folder)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": []}, "rope_scaling"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"max_position_embeddings": 10**30}, "max_seq_len"),
        ({"num_hidden_layers": 2**31 - 1}, "num_layers"),
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": 0}}, "factor must be positive"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 0}}, "original_max_position"),
        ({"ar2diff": {**tiny_diffusion().as_json(), "trained_block_sizes": [4, 10**12]}}, "beyond the context"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"head_dim": None, "num_attention_heads": 5}, "multiple of num_attention_heads"),
        ({"vocab_size": 258}, "more ids than the embedding has rows"),
        ({"vocab_size": 300}, "embed_tokens.weight must have shape"),
        ({"num_hidden_layers": 3}, "model.layers.2.* is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.* has no place"),
        ({"attention_bias": True}, "bias is missing"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"ar2diff": {"block_size": 4}}, "diffusion settings"),
        ({"ar2diff": [1]}, "diffusion settings"),
        ({"ar2diff": {**tiny_diffusion().as_json(), "block_size": "4"}}, "diffusion settings"),
        ({"ar2diff": {**tiny_diffusion().as_json(), "block_size": 8}}, "block_size"),
        ({"ar2diff": {**tiny_diffusion().as_json(), "anchor": "first"}}, "anchor is predicted or last"),
        ({"ar2diff": {**tiny_diffusion().as_json(), "mask_token_id": 999}}, "mask_token_id"),
    ],
)
def test_an_impossible_config_is_named(changes, message, folder):
    rewrite_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_a_config_that_is_no_object_is_named(content, folder):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json|JSON"):
        load_model(folder)


# Saving.


def test_saving_never_mixes_with_a_sharded_model(folder):
    shard(folder, {})
    with pytest.raises(ModelError, match="sharded"):
        save_model(folder, tiny_model(0), None)


def test_a_model_that_is_not_finite_saves_but_never_loads(tmp_path):
    save_model(tmp_path, nan_model(), None)
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds values"):
        load_model(tmp_path)


def test_a_full_disk_leaves_the_old_model_whole(folder, monkeypatch):
    before = (folder / WEIGHTS).read_bytes()

    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(SpaceError):
        save_model(folder, tiny_model(1), None)
    assert (folder / WEIGHTS).read_bytes() == before
    assert not list(folder.glob(f"*{PARTIAL_MARK}*"))
