"""Stable-DiffCoder: the Llama shape with block diffusion, for transformers and Diffulex."""

from ar2diff.export.layout import (
    Layout,
    base_facts,
    diffusion_entry,
    remote_files,
    render_readme,
    shared_config,
    untied,
)
from ar2diff.export.source import ExportSource, PlannedTensor
from ar2diff.export.verify import (
    COMMON,
    EMBEDDING,
    Check,
    ExportFolder,
    Shapes,
    field_is,
    fields_are_of,
    head_never_says_mask,
    llama_tensors,
    mask_row_is_trained,
    readme_tells,
    remote_code_loads,
    tensors_are,
)

_CLASS, _MODULE = "StableDiffcoderForCausalLM", "modeling_stable_diffcoder"
_AUTO_MAP = {"AutoModelForCausalLM": f"{_MODULE}.{_CLASS}"}
_BODY = """
## transformers

```python
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
answer = model.generate(input_ids, max_new_tokens=128)
```

## Diffulex

Load the folder as a `stable_diffcoder` model with block size {block_size} and mask id {mask_token_id}.

## What differs from training

Diffulex cuts blocks at absolute positions and reads the prompt in blocks; training cut them from the first answer
token and read the prompt causally. Measure your task in the engine before you rely on it.
"""


def lay_out(source: ExportSource) -> Layout:
    """The folder in Stable-DiffCoder's format; Qwen2's biases become a Llama's, with zeros on the output."""
    diffusion, model = source.diffusion, source.config
    has_bias = model.qkv_bias or model.output_bias
    config = {
        "architectures": [_CLASS],
        "model_type": "llama",
        "auto_map": _AUTO_MAP,
        **shared_config(source),
        "attention_bias": has_bias,
        "mlp_bias": False,
        "block_diffusion": diffusion_entry(source),
    }
    facts = base_facts(source)
    body = _BODY.format(block_size=diffusion.block_size, mask_token_id=diffusion.mask_token_id)
    return Layout(
        config=config,
        tensors=[*untied(source), *_missing_biases(source)],
        mask_token_id=diffusion.mask_token_id,
        files=remote_files("LlamaForCausalLM", _CLASS, _MODULE),
        readme=render_readme("Block diffusion, in Stable-DiffCoder's format", facts, body),
    )


def _missing_biases(source: ExportSource) -> list[PlannedTensor]:
    model = source.config
    if not model.qkv_bias or model.output_bias:
        return []
    shape = (model.hidden_size,)
    return [
        PlannedTensor(
            name=f"model.layers.{idx}.self_attn.o_proj.bias", shape=shape, build=lambda: source.zeros(shape)
        )
        for idx in range(model.num_layers)
    ]


def _expected(folder: ExportFolder) -> Shapes:
    has_bias = folder.config.get("attention_bias") is True
    return llama_tensors(folder, qkv_bias=has_bias, output_bias=has_bias, head_norm=False, tied=False)


def _is_diffcoder(folder: ExportFolder) -> str | None:
    names = folder.config.get("architectures")
    if not isinstance(names, list) or not any("StableDiffcoder" in str(name) for name in names):
        return f"config.json has architectures = {names!r}"
    return None


CHECKS: dict[str, Check] = {
    **COMMON,
    "architecture": Check("Diffulex knows the format by StableDiffcoder in this field alone.", _is_diffcoder),
    "model type": Check("The format is stored as a llama.", field_is("model_type", "llama")),
    "code": Check(
        "transformers loads the classes from these files, on machines without GPU kernels.", remote_code_loads
    ),
    "auto map": Check("Without it transformers loads a plain llama.", field_is("auto_map", _AUTO_MAP)),
    "mask id": Check("The mask is read from the config.", fields_are_of({"mask_token_id": int, "pad_token_id": int})),
    "biases": Check("They say which tensors there are.", fields_are_of({"attention_bias": bool, "mlp_bias": bool})),
    "untied head": Check(
        "The head's mask row must differ from the embedding's.", field_is("tie_word_embeddings", False)
    ),
    "tensors": Check(
        "A name that an engine does not know is an error, a missing one is random.", tensors_are(_expected)
    ),
    "mask row": Check("A row near zero makes every masked position alike noise.", mask_row_is_trained(EMBEDDING)),
    "head mask row": Check("Samplers do not ban the mask.", head_never_says_mask),
    "launch line": Check(
        "Engine and training must agree.", readme_tells("block size {block_size}", "{mask_token_id}")
    ),
}
