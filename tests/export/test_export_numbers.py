"""An exported folder computes what our model computes, by a plain re-statement of what the target's engines do."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from ar2diff.attention.ops import masked_attend
from ar2diff.models.loading import load_model

TARGETS = ["sdar", "fast-dllm-v2", "stable-diffcoder", "llada2-dense"]
PREFIX, BLOCK = 9, 4


def norm(x, weight, eps):
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def turn(x, theta):
    """Rotary positions, first half against second; x is (heads, length, size)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def split_heads(x, size):
    return x.view(len(x), -1, size).transpose(0, 1)


def attend(config, tensors, at, x, seen):
    size = config["head_dim"]
    if f"{at}.attention.query_key_value.weight" in tensors:
        fused = x @ tensors[f"{at}.attention.query_key_value.weight"].T
        fused = fused + tensors.get(f"{at}.attention.query_key_value.bias", 0)
        queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        q, k, v = fused.split((queries, keys, keys), dim=-1)
        norms, out = ("attention.query_layernorm", "attention.key_layernorm"), "attention.dense"
    else:
        parts = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
        q, k, v = (x @ tensors[f"{part}.weight"].T + tensors.get(f"{part}.bias", 0) for part in parts)
        norms, out = ("self_attn.q_norm", "self_attn.k_norm"), "self_attn.o_proj"
    q, k, v = (split_heads(part, size) for part in (q, k, v))
    if f"{at}.{norms[0]}.weight" in tensors:
        q, k = (
            norm(part, tensors[f"{at}.{name}.weight"], config["rms_norm_eps"])
            for part, name in zip((q, k), norms, strict=True)
        )
    q, k = turn(q, config["rope_theta"]), turn(k, config["rope_theta"])
    groups = len(q) // len(k)
    scores = q @ k.repeat_interleave(groups, dim=0).transpose(1, 2) / math.sqrt(size)
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
    mixed = (weights @ v.repeat_interleave(groups, dim=0)).transpose(0, 1).flatten(1)
    return mixed @ tensors[f"{at}.{out}.weight"].T + tensors.get(f"{at}.{out}.bias", 0)


def compute(folder, ids, seen):
    """Logits of the exported folder, from its files alone."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    embedding = "model.word_embeddings" if "model.word_embeddings.weight" in tensors else "model.embed_tokens"
    x, eps = tensors[f"{embedding}.weight"][ids], config["rms_norm_eps"]
    for idx in range(config["num_hidden_layers"]):
        at = f"model.layers.{idx}"
        x = x + attend(config, tensors, at, norm(x, tensors[f"{at}.input_layernorm.weight"], eps), seen)
        y = norm(x, tensors[f"{at}.post_attention_layernorm.weight"], eps)
        gate, up = (y @ tensors[f"{at}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ tensors[f"{at}.mlp.down_proj.weight"].T
    return norm(x, tensors["model.norm.weight"], eps) @ tensors["lm_head.weight"].T


@pytest.mark.parametrize("target", TARGETS)
def test_the_exported_numbers_are_ours_under_a_block_causal_mask(target, origin, exported):
    model, folder = load_model(origin(target)), exported(target)
    ours, theirs = model.diffusion.mask_token_id, json.loads((folder / "config.json").read_text())["mask_token_id"]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 256, (PREFIX + BLOCK,), generator=generator)
    masks = torch.arange(len(ids)) >= PREFIX + 1
    places = torch.arange(len(ids))
    blocks = (places - PREFIX).div(BLOCK, rounding_mode="floor")
    seen = blocks[:, None] >= blocks[None, :]
    with torch.inference_mode():
        hidden = model.decoder(
            ids.where(~masks, torch.tensor(ours))[None], places[None], masked_attend(seen, model.config.softmax_scale)
        )[0]
        wanted = model.decoder.logits(hidden)
        got = compute(folder, ids.where(~masks, torch.tensor(theirs)), seen)
    columns = [idx for idx in range(260) if idx != ours]
    torch.testing.assert_close(got[:, columns], wanted[:, columns], atol=1e-4, rtol=1e-4)
    assert (got[:, theirs] == 0).all()


@pytest.mark.parametrize("target", [*TARGETS, "hf", "gguf"])
def test_an_export_passes_its_own_verifier_and_leaves_nothing_behind(target, exported):
    from ar2diff.export.export import verify_export

    folder = exported(target)
    assert verify_export(folder, target) == []
    assert [path.name for path in folder.parent.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("target", [*TARGETS, "hf"])
def test_transformers_reads_the_exported_tokenizer_with_its_mask(target, exported):
    import transformers

    folder = exported(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    mask = json.loads((folder / "config.json").read_text())["mask_token_id"]
    assert tokenizer.mask_token_id == mask
    assert tokenizer.decode([104, 105, mask], skip_special_tokens=True) == "hi"
    assert tokenizer.encode("héllo", add_special_tokens=False) == list("héllo".encode())


@pytest.mark.parametrize("target", ["sdar", "fast-dllm-v2"])
def test_the_config_class_keeps_rope_theta_as_a_plain_number(target, exported):
    import transformers

    config = transformers.AutoConfig.from_pretrained(exported(target), trust_remote_code=True)
    assert config.rope_theta == 20000.0
    assert config.rope_parameters["rope_theta"] == 20000.0
