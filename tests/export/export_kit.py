"""Small converted models of the families that the formats are made from, written to disk."""

import json

import torch
import transformers

from ar2diff.models.gguf_tokenizer import PRE_TOKENIZERS
from ar2diff.testing.models import CONTROL_TOKENS, MASK_ID, byte_tokenizer

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}
UNSHIFTED_BLOCKS = {"shift_logits": False, "clean_attention": "block"}
SHIFTED_BLOCKS = {"shift_logits": True, "clean_attention": "block"}
SHIFTED_CAUSAL = {"shift_logits": True, "clean_attention": "causal"}
# What each target is exported from here: the family, its mask row, and how it was converted.
ORIGINS = {
    "sdar": ("Qwen3", 151_669, UNSHIFTED_BLOCKS),
    "fast-dllm-v2": ("Qwen2", 151_665, SHIFTED_BLOCKS),
    "stable-diffcoder": ("Llama", MASK_ID, UNSHIFTED_BLOCKS),
    "llada2-dense": ("Qwen2", MASK_ID, UNSHIFTED_BLOCKS),
    "hf": ("Llama", MASK_ID, SHIFTED_CAUSAL),
    "gguf": ("Llama", MASK_ID, SHIFTED_CAUSAL),
}


def move_end_of_turn(folder, idx):
    """Give the end of a turn the id that Qwen's has."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    for token in stored["added_tokens"]:
        if token["content"] == "<|im_end|>":
            token["id"] = stored["model"]["vocab"]["<|im_end|>"] = idx
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token_ids": [idx]}))


def split_like_smollm(folder):
    """A splitting rule that GGUF has a name for, and a merge: without any llama.cpp refuses the file."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    # An added token that the vocabulary lacks would be numbered anew behind the merge.
    stored["model"]["vocab"] |= {token["content"]: token["id"] for token in stored["added_tokens"]}
    stored["model"]["vocab"]["he"] = len(CONTROL_TOKENS) + 256
    stored["model"]["merges"] = [["h", "e"]]
    stored["pre_tokenizer"] = json.loads(PRE_TOKENIZERS["smollm"]().__getstate__())
    (folder / "tokenizer.json").write_text(json.dumps(stored))


def write_model(folder, family, mask_token_id, conversion, **overrides):
    """A random model of a family with a byte tokenizer, stored as a converted checkpoint; returns the folder."""
    # One row more than the bytes and control tokens have, for a merge.
    vocab_size = max(len(CONTROL_TOKENS) + 257, mask_token_id + 1)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, "vocab_size": vocab_size, **overrides})
    twin = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    generator = torch.Generator().manual_seed(7)
    for name, parameter in twin.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (1 if "norm" in name else 0) + noise * (0.3 if parameter.ndim == 1 else 0.2)
    twin.save_pretrained(folder)
    byte_tokenizer().save(folder)
    if mask_token_id == 151_665:
        move_end_of_turn(folder, 151_645)
    stored = json.loads((folder / "config.json").read_text())
    diffusion = {"block_size": 4, "trained_block_sizes": [2, 4], "mask_token_id": mask_token_id, **conversion}
    (folder / "config.json").write_text(json.dumps({**stored, "ar2diff": diffusion}))
    return folder
