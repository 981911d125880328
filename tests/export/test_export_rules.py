"""What may become what, what is refused and why, adapters, memory, and the command."""

import json

import pytest
import torch
from export_kit import MASK_ID, SHIFTED_BLOCKS, SHIFTED_CAUSAL, UNSHIFTED_BLOCKS
from safetensors.torch import load_file

from ar2diff.cli import run as run_command
from ar2diff.errors import ConfigError, ModelError
from ar2diff.export.export import ExportOptions, export_model, verify_export
from ar2diff.export.matrix import TARGETS, list_closed_reasons, list_open_targets
from ar2diff.export.source import PlannedTensor
from ar2diff.export.write import write_tensors
from ar2diff.models.adapters import AdapterConfig, GatedAdapter, merge_adapter
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.loading import load_model, named_tensors, save_model
from ar2diff.models.safetensors_file import read_tensors
from ar2diff.testing.models import tiny_config, tiny_diffusion, tiny_model

QWEN3 = tiny_config(model_type="qwen3", qk_norm="head")
QWEN2 = tiny_config(model_type="qwen2", qkv_bias=True)
LLAMA = tiny_config()
GRANITE = tiny_config(model_type="granite", embedding_scale=12.0)


def converted(mask, conversion):
    return DiffusionConfig(block_size=4, trained_block_sizes=(4,), mask_token_id=mask, **conversion)


@pytest.mark.parametrize(
    ("model", "mask", "conversion", "wanted"),
    [
        (QWEN3, 151_669, UNSHIFTED_BLOCKS, ["sdar", "llada2-dense", "hf", "gguf", "adapter"]),
        (QWEN3, 258, UNSHIFTED_BLOCKS, ["llada2-dense", "hf", "gguf", "adapter"]),
        (QWEN2, 151_665, SHIFTED_BLOCKS, ["fast-dllm-v2", "hf", "gguf", "adapter"]),
        (QWEN2, 151_665, UNSHIFTED_BLOCKS, ["stable-diffcoder", "llada2-dense", "hf", "gguf", "adapter"]),
        (LLAMA, 258, UNSHIFTED_BLOCKS, ["stable-diffcoder", "llada2-dense", "hf", "gguf", "adapter"]),
        (LLAMA, 258, SHIFTED_CAUSAL, ["hf", "gguf", "adapter"]),
        (LLAMA, 258, {**SHIFTED_CAUSAL, "anchor": "last"}, ["adapter"]),
        (GRANITE, 258, UNSHIFTED_BLOCKS, ["hf", "adapter"]),
    ],
)
def test_the_matrix_says_what_a_base_can_become(model, mask, conversion, wanted):
    assert list_open_targets(model, converted(mask, conversion)) == wanted


def test_every_closed_target_says_why():
    for target in TARGETS:
        reasons = list_closed_reasons(target, GRANITE, converted(258, SHIFTED_CAUSAL))
        assert (reasons == []) == (target in ("hf", "adapter"))


def test_a_refusal_names_the_reason_and_what_fits(origin, tmp_path):
    with pytest.raises(ConfigError, match=r"shifted.*Open to it: hf, gguf, adapter"):
        export_model(origin("hf"), "stable-diffcoder", tmp_path / "out", ExportOptions())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_written_into(origin, tmp_path):
    with pytest.raises(ConfigError, match="exists"):
        export_model(origin("hf"), "hf", tmp_path, ExportOptions())


def test_an_unconverted_model_is_refused(tmp_path):
    model = tiny_model(0)
    save_model(tmp_path / "plain", model, None)
    with pytest.raises(ModelError, match="no converted model"):
        export_model(tmp_path / "plain", "hf", tmp_path / "out", ExportOptions())


@pytest.fixture
def adapted(tmp_path):
    model = tiny_model(1, diffusion=tiny_diffusion())
    adapter = GatedAdapter(model.decoder, AdapterConfig(rank=4), mask_token_id=MASK_ID, seed=0)
    generator = torch.Generator().manual_seed(2)
    for parameter in adapter.parameters().values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    save_model(tmp_path / "adapted", model, model.diffusion)
    return tmp_path / "adapted"


def test_an_adapter_must_be_merged_knowingly(adapted, tmp_path):
    with pytest.raises(ConfigError, match="--merge"):
        export_model(adapted, "hf", tmp_path / "out", ExportOptions())


def test_a_merged_export_holds_the_draft_modes_weights(adapted, tmp_path):
    export_model(adapted, "hf", tmp_path / "out", ExportOptions(merge=True))
    model = load_model(adapted)
    merge_adapter(model.decoder)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in named_tensors(model.decoder, model.hf_config).items():
        torch.testing.assert_close(stored[name], tensor)


def test_an_adapter_leaves_on_its_own_and_is_verified(adapted, tmp_path):
    export_model(adapted, "adapter", tmp_path / "out", ExportOptions())
    assert verify_export(tmp_path / "out", "adapter") == []
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    config["r"] = 8
    (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(config))
    assert "rank" in [finding.check for finding in verify_export(tmp_path / "out", "adapter")]


def test_merging_without_an_adapter_is_refused(origin, tmp_path):
    with pytest.raises(ConfigError, match="no adapter"):
        export_model(origin("hf"), "hf", tmp_path / "out", ExportOptions(merge=True))
    with pytest.raises(ConfigError, match="no adapter"):
        export_model(origin("hf"), "adapter", tmp_path / "out", ExportOptions())


def test_shards_have_an_index_and_read_back_whole(tmp_path):
    tensors = {f"layer.{idx}.weight": torch.randn(8, 8) for idx in range(5)}
    plan = [PlannedTensor(name=n, shape=(8, 8), build=lambda t=t: t) for n, t in tensors.items()]
    total = write_tensors(tmp_path, plan, torch.float32, shard_bytes=600)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert total == index["metadata"]["total_size"] == 5 * 256
    assert len(set(index["weight_map"].values())) == 3
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(tmp_path))


def test_the_command_exports_and_verifies(origin, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_command(["export", str(origin("hf")), "--to", "hf", "--out", str(out), "--dtype", "bf16"]) == 0
    assert run_command(["export", "--verify", str(out), "--to", "hf"]) == 0
    assert "passes 8 checks as hf" in capsys.readouterr().out
    (out / "generation_config.json").unlink()
    assert run_command(["export", "--verify", str(out), "--to", "hf"]) == 1
    assert "FAIL end of turn" in capsys.readouterr().out
    assert run_command(["export", "--to", "hf"]) == 2
