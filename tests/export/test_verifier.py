"""An export broken in any way that an engine would trip over is named by its verifier."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ar2diff.errors import ConfigError, ModelError
from ar2diff.export.export import verify_export

LAYER = "model.layers.1"


def set_field(key, value):
    def edit(folder):
        stored = json.loads((folder / "config.json").read_text())
        stored[key] = value
        (folder / "config.json").write_text(json.dumps(stored))

    return edit


def drop_field(key):
    def edit(folder):
        stored = json.loads((folder / "config.json").read_text())
        del stored[key]
        (folder / "config.json").write_text(json.dumps(stored))

    return edit


def change_tensors(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")

    return edit


def change_json(name, change):
    def edit(folder):
        stored = json.loads((folder / name).read_text())
        change(stored)
        (folder / name).write_text(json.dumps(stored))

    return edit


def rename(old, new):
    return change_tensors(lambda tensors: tensors.update({new: tensors.pop(old)}))


def drop(name):
    return change_tensors(lambda tensors: tensors.pop(name))


def add(name):
    return change_tensors(lambda tensors: tensors.update({name: torch.zeros(32)}))


def cut(name):
    return change_tensors(lambda tensors: tensors.update({name: tensors[name][:-1]}))


def zero_mask_row(name, row):
    return change_tensors(lambda tensors: tensors[name][row].zero_())


def fill_mask_row(row):
    return change_tensors(lambda tensors: tensors["lm_head.weight"][row].fill_(0.5))


def unspecial(tokenizer):
    for token in tokenizer["added_tokens"]:
        token["special"] = False


def no_added(tokenizer):
    tokenizer["added_tokens"] = []


def half_precision(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float16)


def rewrite_readme(folder):
    (folder / "README.md").write_text("# A model\n")


def remove(name):
    return lambda folder: (folder / name).unlink()


def untell(word):
    """Take a word out of the README."""

    def edit(folder):
        text = (folder / "README.md").read_text()
        assert word in text
        (folder / "README.md").write_text(text.replace(word, ""))

    return edit


def import_kernels(name):
    """The modelling code hard-imports GPU kernels, as upstream's does."""

    def edit(folder):
        (folder / name).write_text("from flash_attn import flash_attn_func\n" + (folder / name).read_text())

    return edit


COMMON = {
    "a size is a text": (set_field("hidden_size", "32"), "sizes"),
    "head_dim is missing": (drop_field("head_dim"), "sizes"),
    "rope_theta is nested": (set_field("rope_theta", {"theta": 20000.0}), "rope theta"),
    "the dtype word is another": (set_field("dtype", "bfloat16"), "dtype"),
    "one tensor has another dtype": (change_tensors(half_precision), "dtype"),
    "the mask is not special": (change_json("tokenizer.json", unspecial), "mask token"),
    "the mask is not declared": (change_json("tokenizer.json", no_added), "mask token"),
    "the mask has no name": (
        change_json("tokenizer_config.json", lambda config: config.pop("mask_token")),
        "mask token",
    ),
    "nothing ends a turn": (
        change_json("generation_config.json", lambda config: config.pop("eos_token_id")),
        "end of turn",
    ),
    "no generation config": (remove("generation_config.json"), "end of turn"),
    "another architecture": (set_field("architectures", ["LlamaForCausalLM"]), "architecture"),
    "the readme is empty of facts": (rewrite_readme, "launch line"),
    "the head is tied": (set_field("tie_word_embeddings", True), "untied head"),
    "the mask row is zero": (zero_mask_row("model.embed_tokens.weight", "MASK"), "mask row"),
    "the head predicts the mask": (fill_mask_row("MASK"), "head mask row"),
    "the head is missing": (drop("lm_head.weight"), "tensors"),
    "a tensor too many": (add(f"{LAYER}.self_attn.rotary_emb.inv_freq"), "tensors"),
    "a norm is missing": (drop(f"{LAYER}.input_layernorm.weight"), "tensors"),
    "a matrix is cut": (cut(f"{LAYER}.mlp.down_proj.weight"), "tensors"),
}
OWN = {
    "sdar": {
        "another mask id": (set_field("mask_token_id", 258), "mask id"),
        "another model type": (set_field("model_type", "qwen3"), "model type"),
        "no auto map": (drop_field("auto_map"), "auto map"),
        "a sliding window": (set_field("sliding_window", 4096), "windows"),
        "no word on windows": (drop_field("use_sliding_window"), "windows"),
        "no padding": (drop_field("pad_token_id"), "pad token"),
        "the config class drops rope_theta": (
            lambda folder: (folder / "configuration_sdar.py").write_text("class SDARConfig: pass\n"),
            "config code",
        ),
        "no modelling code": (remove("modeling_sdar.py"), "code"),
        "no configuration code": (remove("configuration_sdar.py"), "code"),
        "the code beside it is missing": (remove("block_diffusion.py"), "code"),
        "the code imports GPU kernels": (import_kernels("modeling_sdar.py"), "code"),
        "the code is no Python": (lambda folder: (folder / "modeling_sdar.py").write_text("def ("), "code"),
        "the engine's algorithm is not told": (untell("--dllm-algorithm LowConfidence"), "launch line"),
        "batching is not told": (untell("--max-running-requests"), "launch line"),
        "the block size is not told to SGLang": (untell("block_size: 4"), "launch line"),
        "the block size is not told to LMDeploy": (untell("--dllm-block-length 4"), "launch line"),
        "the unmasking is not told": (untell("low_confidence_dynamic"), "launch line"),
        "a query norm is missing": (drop(f"{LAYER}.self_attn.q_norm.weight"), "tensors"),
    },
    "fast-dllm-v2": {
        "another mask id": (set_field("mask_token_id", 258), "mask id"),
        "the config class drops rope_theta": (
            lambda folder: (folder / "configuration.py").write_text("class Fast_dLLM_QwenConfig: pass\n"),
            "config code",
        ),
        "no modelling code": (remove("modeling.py"), "code"),
        "the code imports GPU kernels": (import_kernels("modeling.py"), "code"),
        "no bd_size": (drop_field("bd_size"), "block size"),
        "another bd_size": (set_field("bd_size", 32), "block size"),
        "another stop": (change_json("generation_config.json", lambda c: c.update(eos_token_id=2)), "stop id"),
        "sliding layers": (set_field("layer_types", ["sliding_attention"] * 2), "layer types"),
        "a bias on the output": (add(f"{LAYER}.self_attn.o_proj.bias"), "tensors"),
        "no bias on q": (drop(f"{LAYER}.self_attn.q_proj.bias"), "tensors"),
        "another model type": (set_field("model_type", "qwen2"), "model type"),
        "no auto map": (drop_field("auto_map"), "auto map"),
    },
    "stable-diffcoder": {
        "another model type": (set_field("model_type", "qwen2"), "model type"),
        "no modelling code": (remove("modeling_stable_diffcoder.py"), "code"),
        "no mask id": (drop_field("mask_token_id"), "mask id"),
        "no padding": (drop_field("pad_token_id"), "mask id"),
        "no head_dim": (drop_field("head_dim"), "sizes"),
        "no auto map": (drop_field("auto_map"), "auto map"),
        "no word on biases": (drop_field("attention_bias"), "biases"),
        "biases declared, none there": (set_field("attention_bias", True), "tensors"),
    },
    "llada2-dense": {
        "a layer of experts": (set_field("first_k_dense_replace", 1), "dense"),
        "no word on norms": (drop_field("use_qk_norm"), "switches"),
        "half of a head rotates": (set_field("partial_rotary_factor", 0.5), "rotary"),
        "the moved mask row is zero": (zero_mask_row("model.word_embeddings.weight", 156_895), "mask row"),
        "no padding": (drop_field("pad_token_id"), "switches"),
        "too small a vocabulary": (set_field("vocab_size", 50_000), "vocabulary"),
        "another mask id": (set_field("mask_token_id", 258), "mask id"),
        "the fused matrix is split": (
            rename(f"{LAYER}.attention.query_key_value.weight", f"{LAYER}.attention.q_proj.weight"),
            "tensors",
        ),
    },
    "hf": {
        "another class": (set_field("architectures", ["LlamaForCausalLM"]), "class"),
        "no code": (remove("block_diffusion.py"), "code"),
        "no auto map": (drop_field("auto_map"), "code"),
        "the code imports GPU kernels": (import_kernels("modeling_ar2diff.py"), "code"),
        "no settings": (drop_field("block_diffusion"), "settings"),
        "two mask tokens": (set_field("mask_token_id", 259), "settings"),
        "a tensor is missing": (drop(f"{LAYER}.mlp.up_proj.weight"), "tensors"),
        "the readme is empty of facts": (rewrite_readme, "readme"),
    },
}
# Names that these formats store differently.
EXCEPT = {
    "llada2-dense": {"the mask row is zero"},
    "hf": {name for name, (_, check) in COMMON.items() if check not in ("dtype", "mask token", "end of turn")},
}
CASES = [
    (target, name)
    for target in OWN
    for name in [*(name for name in COMMON if name not in EXCEPT.get(target, ())), *OWN[target]]
]


@pytest.mark.parametrize(("target", "name"), CASES)
def test_the_verifier_names_what_is_broken(target, name, exported, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(exported(target), folder)
    edit, check = {**COMMON, **OWN[target]}[name]
    if name in ("the mask row is zero", "the head predicts the mask"):
        mask = json.loads((folder / "config.json").read_text())["mask_token_id"]
        edit = zero_mask_row("model.embed_tokens.weight", mask) if "zero" in name else fill_mask_row(mask)
    edit(folder)
    findings = verify_export(folder, target)
    assert check in [finding.check for finding in findings]
    assert all(finding.reason and finding.found for finding in findings)


def test_a_folder_that_is_no_model_or_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no exported folder"):
        verify_export(tmp_path / "nowhere", "sdar")
    with pytest.raises(ModelError, match="file not found"):
        verify_export(tmp_path, "sdar")
    with pytest.raises(ConfigError, match="unknown export target"):
        verify_export(tmp_path, "onnx")


def test_pickled_weights_are_refused(exported, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(exported("hf"), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle"):
        verify_export(folder, "hf")
