"""Fast-dLLM v2: Qwen2 with block diffusion and shifted logits, for transformers and Diffulex."""

from ar2diff.errors import ConfigError
from ar2diff.export.layout import (
    Layout,
    RemoteConfig,
    base_facts,
    diffusion_entry,
    remote_files,
    render_readme,
    shared_config,
    untied,
)
from ar2diff.export.matrix import FAST_DLLM_MASK_ID
from ar2diff.export.source import ExportSource
from ar2diff.export.verify import (
    COMMON,
    EMBEDDING,
    Check,
    ExportFolder,
    Shapes,
    config_keeps_rope_theta,
    field_is,
    head_never_says_mask,
    llama_tensors,
    mask_row_is_trained,
    readme_tells,
    remote_code_loads,
    tensors_are,
)

_CLASS = "Fast_dLLM_QwenForCausalLM"
_CONFIG = RemoteConfig(
    name="Fast_dLLM_QwenConfig", module="configuration", base="Qwen2Config", model_type="Fast_dLLM_Qwen"
)
_AUTO_MAP = {"AutoConfig": "configuration.Fast_dLLM_QwenConfig", "AutoModelForCausalLM": f"modeling.{_CLASS}"}
_STOP_ID = 151_645
_BODY = """
## transformers

```python
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
answer = model.generate(input_ids, max_new_tokens=128)
```

## Diffulex

Load the folder as a `fast_dllm_v2` model with block size {block_size}. It masks with id 151665 and stops at 151645,
whatever the config says.
"""


def lay_out(source: ExportSource) -> Layout:
    """The folder in Fast-dLLM v2's format.

    Raises:
        ConfigError: a turn ends otherwise than the format's samplers, which hard-code it, would see.
    """
    diffusion = source.diffusion
    if _STOP_ID not in source.tokenizer.eos_token_ids:
        given = f"end of turn ids {source.tokenizer.eos_token_ids}"
        raise ConfigError(f"samplers of fast-dllm-v2 stop at id {_STOP_ID} only", given=given, fix="Export to hf")
    config = {
        "architectures": [_CLASS],
        "model_type": "Fast_dLLM_Qwen",
        "auto_map": _AUTO_MAP,
        **shared_config(source),
        "bd_size": diffusion.block_size,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": source.config.num_layers,
        "layer_types": ["full_attention"] * source.config.num_layers,
        "block_diffusion": diffusion_entry(source),
    }
    return Layout(
        config=config,
        tensors=untied(source),
        mask_token_id=diffusion.mask_token_id,
        files=remote_files("Qwen2ForCausalLM", _CLASS, "modeling", config=_CONFIG),
        readme=render_readme(
            "Block diffusion, in Fast-dLLM v2's format",
            base_facts(source),
            _BODY.format(block_size=diffusion.block_size),
        ),
    )


def _expected(folder: ExportFolder) -> Shapes:
    return llama_tensors(folder, qkv_bias=True, output_bias=False, head_norm=False, tied=False)


def _layers_see_all(folder: ExportFolder) -> str | None:
    wanted = ["full_attention"] * folder.number("num_hidden_layers")
    return field_is("layer_types", wanted)(folder)


def _stops_at_the_turn(folder: ExportFolder) -> str | None:
    ends = folder.generation.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends]
    return None if _STOP_ID in ids else f"generation_config.json stops at {ends!r}, not at {_STOP_ID}"


def _block_size_is_told(folder: ExportFolder) -> str | None:
    return field_is("bd_size", folder.number("block_size"))(folder)


CHECKS: dict[str, Check] = {
    **COMMON,
    "architecture": Check("Engines choose their model class by it.", field_is("architectures", [_CLASS])),
    "model type": Check("transformers chooses the config class by it.", field_is("model_type", "Fast_dLLM_Qwen")),
    "code": Check(
        "transformers loads the classes from these files, on machines without GPU kernels.", remote_code_loads
    ),
    "config code": Check(
        "Without a plain attribute an engine raises, or silently takes 10000.", config_keeps_rope_theta
    ),
    "auto map": Check("Without it transformers knows no such class.", field_is("auto_map", _AUTO_MAP)),
    "block size": Check("Samplers read the block size as bd_size.", _block_size_is_told),
    "mask id": Check("Samplers hard-code 151665.", field_is("mask_token_id", FAST_DLLM_MASK_ID)),
    "stop id": Check("Samplers hard-code the stop 151645.", _stops_at_the_turn),
    "layer types": Check("Another type cuts the cache.", _layers_see_all),
    "untied head": Check(
        "The head's mask row must differ from the embedding's.", field_is("tie_word_embeddings", False)
    ),
    "tensors": Check("A bias too many is an error, a missing one is random.", tensors_are(_expected)),
    "mask row": Check("A row near zero makes every masked position alike noise.", mask_row_is_trained(EMBEDDING)),
    "head mask row": Check("Samplers do not ban the mask.", head_never_says_mask),
    "launch line": Check("The block size must be given to the engine.", readme_tells("block size {block_size}")),
}
