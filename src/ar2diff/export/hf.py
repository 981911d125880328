"""Plain transformers: the base's own files, and a `generate` that does block diffusion.

The folder keeps the base's model_type, so that without remote code it loads as what the clean stream is: for a
causal conversion, the AR model.
"""

from ar2diff.export.layout import Layout, base_facts, diffusion_entry, pad_id, remote_files, render_readme
from ar2diff.export.source import ExportSource
from ar2diff.export.verify import (
    COMMON,
    Check,
    ExportFolder,
    Shapes,
    field_is,
    readme_tells,
    remote_code_loads,
    tensors_are,
)
from ar2diff.models.families.table import find_family, read_decoder_config

# What of transformers computes each family.
CLASSES: dict[str, str] = {
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "minicpm": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_CLASS, _MODULE = "Ar2diffForBlockDiffusion", "modeling_ar2diff"
_BODY = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True, attn_implementation="sdpa")
chat = [{"role": "user", "content": "Hello"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**prompt, max_new_tokens=128, policy="threshold", policy_parameter=0.9)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True))
```

`generate` takes `denoising_steps`, `policy` (threshold, top_k, factor, entropy, left_to_right), `policy_parameter`,
`block_size` among the trained ones, `temperature` and `generator`. `mode="ar"` is the family's own generation.
Any other argument is refused, not ignored. The mask and ids that the tokenizer does not know are never emitted.
"""


def lay_out(source: ExportSource) -> Layout:
    """The folder for transformers."""
    diffusion = source.diffusion
    config = {key: value for key, value in source.hf_config.items() if key not in ("torch_dtype", "auto_map")}
    config |= {
        "architectures": [_CLASS],
        "auto_map": {"AutoModelForCausalLM": f"{_MODULE}.{_CLASS}"},
        "dtype": str(source.dtype).removeprefix("torch."),
        "pad_token_id": pad_id(source),
        "mask_token_id": diffusion.mask_token_id,
        "block_diffusion": diffusion_entry(source),
    }
    return Layout(
        config=config,
        tensors=list(source.plan_all()),
        mask_token_id=diffusion.mask_token_id,
        files=remote_files(CLASSES[source.config.model_type], _CLASS, _MODULE),
        readme=render_readme("Block diffusion in transformers", base_facts(source), _BODY),
    )


def _expected(folder: ExportFolder) -> Shapes:
    stored = {key: value for key, value in folder.config.items() if key != "auto_map"}
    model = read_decoder_config(stored)
    hidden, head = model.hidden_size, model.head_dim
    queries, keys = model.num_heads * head, model.num_kv_heads * head
    flat = model.qk_norm == "flat"
    sizes = {
        "embed_tokens.weight": (model.vocab_size, hidden),
        "lm_head.weight": (model.vocab_size, hidden),
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "o_proj.bias": (hidden,),
        "q_norm.weight": (queries if flat else head,),
        "k_norm.weight": (keys if flat else head,),
        "gate_proj.weight": (model.intermediate_size, hidden),
        "up_proj.weight": (model.intermediate_size, hidden),
        "down_proj.weight": (hidden, model.intermediate_size),
        "gate_proj.bias": (model.intermediate_size,),
        "up_proj.bias": (model.intermediate_size,),
        "down_proj.bias": (hidden,),
    }
    names = find_family(stored).tensor_names(model).values()
    return {name: sizes.get(".".join(name.split(".")[-2:]), (hidden,)) for name in names}


def _settings_fit(folder: ExportFolder) -> str | None:
    stored = folder.config.get("block_diffusion")
    keys = {"block_size", "trained_block_sizes", "shift_logits", "mask_token_id", "clean_attention", "num_known_ids"}
    if not isinstance(stored, dict) or set(stored) != keys:
        return "config.json: block_diffusion is missing or incomplete"
    if stored["mask_token_id"] != folder.config.get("mask_token_id"):
        return "config.json names two mask tokens"
    if stored["block_size"] not in stored["trained_block_sizes"]:
        return f"block_size {stored['block_size']} is none of the trained {stored['trained_block_sizes']}"
    return None


_OWN = ("rope theta", "sizes")  # a family's own config.json may place these elsewhere; transformers reads them
CHECKS: dict[str, Check] = {
    **{name: check for name, check in COMMON.items() if name not in _OWN},
    "class": Check("transformers finds the model class by this name.", field_is("architectures", [_CLASS])),
    "code": Check("The classes are loaded from these files, on machines without GPU kernels.", remote_code_loads),
    "settings": Check("`generate` reads its settings here and has no defaults for them.", _settings_fit),
    "tensors": Check("transformers fills a missing tensor with random values.", tensors_are(_expected)),
    "readme": Check("Users start from the README.", readme_tells("trust_remote_code=True", "{mask_token_id}")),
}
