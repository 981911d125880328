"""A mask-gated adapter leaves the parent as it is, drafts where its gate says, and survives files and merging."""

import json

import pytest
import torch

from ar2diff.attention.ops import causal_attend
from ar2diff.errors import ConfigError, ModelError
from ar2diff.models.adapter_file import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from ar2diff.models.adapters import AdapterConfig, GatedAdapter, detach_adapter, merge_adapter
from ar2diff.models.loading import load_model, save_model
from ar2diff.models.safetensors_file import read_file
from ar2diff.testing.models import MASK_ID, tiny_diffusion, tiny_model

CONFIG = AdapterConfig(rank=3, alpha=6.0)
SHAPES = [{}, {"tied_head": False, "qkv_bias": True, "output_bias": True}, {"mlp_bias": True, "num_kv_heads": 4}]


def adapted(seed=0, config=CONFIG, **shape):
    loaded = tiny_model(seed, diffusion=tiny_diffusion(), **shape)
    adapter = GatedAdapter(loaded.decoder, config, mask_token_id=MASK_ID, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter.parameters().values():
        parameter.data.normal_(generator=generator)
    return loaded, adapter


def logits(loaded, ids):
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    with torch.no_grad():
        hidden = loaded.decoder(ids, positions, causal_attend(loaded.config.softmax_scale))
        return loaded.decoder.logits(hidden)


def draw_ids(seed, batch=2, length=11):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_with_the_gate_off_every_bit_is_the_parents(seed, shape):
    loaded, adapter = adapted(seed, **shape)
    ids = draw_ids(seed)
    parent = logits(tiny_model(seed, **shape), ids)
    assert torch.equal(logits(loaded, ids).view(torch.int32), parent.view(torch.int32))
    with adapter.gated(torch.zeros(ids.shape, dtype=torch.bool)):
        assert torch.equal(logits(loaded, ids).view(torch.int32), parent.view(torch.int32))


def test_a_fresh_adapter_changes_nothing_and_a_trained_one_does():
    loaded = tiny_model(0)
    adapter = GatedAdapter(loaded.decoder, CONFIG, mask_token_id=MASK_ID, seed=0)
    ids = draw_ids(0)
    with adapter.gated(True):
        assert torch.equal(logits(loaded, ids), logits(tiny_model(0), ids))
    other, trained = adapted(0)
    with trained.gated(True):
        assert not torch.allclose(logits(other, ids), logits(tiny_model(0), ids), atol=0.1)


def test_a_gate_drafts_its_own_rows_and_leaves_the_rows_before_them_alone():
    loaded, adapter = adapted()
    ids = draw_ids(0)
    gate = torch.zeros(ids.shape, dtype=torch.bool)
    gate[:, 6:] = True
    with adapter.gated(gate):
        mixed = logits(loaded, ids)
    with adapter.gated(True):
        drafted = logits(loaded, ids)
    clean = logits(loaded, ids)
    assert torch.equal(mixed[:, :6], clean[:, :6])
    assert not torch.allclose(mixed[:, 6:], clean[:, 6:], atol=0.1)
    assert not torch.allclose(mixed[:, 6:], drafted[:, 6:], atol=0.1)


def test_the_gate_is_off_again_after_an_error_inside_it():
    loaded, adapter = adapted()
    with pytest.raises(RuntimeError), adapter.gated(True):
        raise RuntimeError
    ids = draw_ids(0)
    assert torch.equal(logits(loaded, ids), logits(tiny_model(0), ids))


@pytest.mark.parametrize("targets", [("q_proj",), ("down_proj", "up_proj")])
def test_only_the_targets_are_changed(targets):
    _, adapter = adapted(config=AdapterConfig(rank=2, alpha=1.0, targets=targets))
    assert {name.rpartition(".")[2] for name in adapter.pairs} == set(targets)
    assert len(adapter.pairs) == 2 * len(targets)


@pytest.mark.parametrize("shape", SHAPES)
def test_merged_weights_compute_what_the_draft_mode_computes(shape):
    loaded, adapter = adapted(**shape)
    ids = draw_ids(1)
    with adapter.gated(True):
        drafted = logits(loaded, ids)
    names = set(loaded.decoder.state_dict())
    merge_adapter(loaded.decoder)
    assert loaded.decoder.adapter is None
    assert set(loaded.decoder.state_dict()) == names
    torch.testing.assert_close(logits(loaded, ids), drafted, rtol=1e-3, atol=1e-3)


def test_a_detached_adapter_leaves_the_parent():
    loaded, _ = adapted()
    detach_adapter(loaded.decoder)
    ids = draw_ids(0)
    assert torch.equal(logits(loaded, ids), logits(tiny_model(0), ids))


def test_a_saved_model_with_its_adapter_loads_with_both_paths(tmp_path):
    loaded, adapter = adapted()
    root = save_model(tmp_path, loaded, loaded.diffusion)
    again = load_model(tmp_path)
    ids = draw_ids(2)
    assert again.tensor_root == root != load_model_without_adapter(tmp_path).tensor_root
    assert torch.equal(logits(again, ids), logits(loaded, ids))
    with adapter.gated(True), again.decoder.adapter.gated(True):
        assert torch.equal(logits(again, ids), logits(loaded, ids))


def load_model_without_adapter(folder):
    hidden = [folder / name for name in (ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME)]
    kept = [path.read_bytes() for path in hidden]
    for path in hidden:
        path.unlink()
    try:
        return load_model(folder)
    finally:
        for path, content in zip(hidden, kept, strict=True):
            path.write_bytes(content)


def test_the_files_have_the_names_and_shapes_that_peft_reads(tmp_path):
    loaded, _ = adapted()
    save_model(tmp_path, loaded, loaded.diffusion)
    tensors = dict(read_file(tmp_path / ADAPTER_WEIGHTS_NAME))
    layer = "base_model.model.model.layers.1.self_attn.k_proj"
    assert tensors[f"{layer}.lora_A.weight"].shape == (3, 32)
    assert tensors[f"{layer}.lora_B.weight"].shape == (16, 3)
    row = tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert torch.equal(row[0], loaded.decoder.embedding.weight[MASK_ID])
    assert len(tensors) == 2 * 7 * 2 + 1
    config = json.loads((tmp_path / ADAPTER_CONFIG_NAME).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6.0)
    assert config["ar2diff"]["gate"] == "noisy"
    assert config["ar2diff"]["base_tensor_root"] == load_model_without_adapter(tmp_path).tensor_root


@pytest.mark.parametrize(
    "change",
    [{"r": 4}, {"peft_type": "IA3"}, {"ar2diff": None}, {"target_modules": ["q_proj"]}, {"lora_alpha": -1.0}],
)
def test_an_adapter_that_says_something_else_is_refused(tmp_path, change):
    loaded, _ = adapted()
    save_model(tmp_path, loaded, loaded.diffusion)
    path = tmp_path / ADAPTER_CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError):
        load_model(tmp_path)


@pytest.mark.parametrize("name", [ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME])
def test_half_an_adapter_is_refused(tmp_path, name):
    loaded, _ = adapted()
    save_model(tmp_path, loaded, loaded.diffusion)
    (tmp_path / name).unlink()
    with pytest.raises(ModelError):
        load_model(tmp_path)


@pytest.mark.parametrize("setting", [{"rank": 0}, {"alpha": 0.0}, {"targets": ()}, {"targets": ("head",)}])
def test_an_impossible_adapter_is_refused(setting):
    with pytest.raises(ConfigError):
        AdapterConfig(**setting)
