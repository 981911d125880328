"""SDAR: Qwen3 with block diffusion, for SGLang, LMDeploy, JetEngine and Diffulex."""

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
from ar2diff.export.matrix import SDAR_MASK_ID
from ar2diff.export.source import ExportSource
from ar2diff.export.verify import (
    COMMON,
    EMBEDDING,
    Check,
    ExportFolder,
    Shapes,
    config_keeps_rope_theta,
    field_is,
    fields_are_of,
    head_never_says_mask,
    llama_tensors,
    mask_row_is_trained,
    readme_tells,
    remote_code_loads,
    tensors_are,
)

_CONFIG = RemoteConfig(name="SDARConfig", module="configuration_sdar", base="Qwen3Config", model_type="sdar")
_AUTO_MAP = {
    "AutoConfig": "configuration_sdar.SDARConfig",
    "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
}
_BODY = """
## SGLang

The engine's own block size is 4; this model's is {block_size}. Put it into `algo.yaml`:

```yaml
block_size: {block_size}
threshold: 0.9
```

```bash
python -m sglang.launch_server --model-path FOLDER --trust-remote-code \\
  --dllm-algorithm LowConfidence --dllm-algorithm-config algo.yaml --max-running-requests 8
```

`--max-running-requests` is there because its default of 1 turns batching off.

## LMDeploy

```bash
lmdeploy serve api_server FOLDER --backend pytorch \\
  --dllm-block-length {block_size} --dllm-unmasking-strategy low_confidence_dynamic
```

## What differs from training

These engines cut blocks at absolute positions and read the prompt in blocks; training cut them from the first answer
token and read the prompt causally. Measure your task in the engine before you rely on it.
"""


def lay_out(source: ExportSource) -> Layout:
    """The folder in SDAR's format."""
    diffusion = source.diffusion
    config = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "auto_map": _AUTO_MAP,
        **shared_config(source),
        "attention_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": source.config.num_layers,
        "block_diffusion": diffusion_entry(source),
    }
    return Layout(
        config=config,
        tensors=untied(source),
        mask_token_id=diffusion.mask_token_id,
        files=remote_files("Qwen3ForCausalLM", "SDARForCausalLM", "modeling_sdar", config=_CONFIG),
        readme=render_readme(
            "Block diffusion, in SDAR's format", base_facts(source), _BODY.format(block_size=diffusion.block_size)
        ),
    )


def _expected(folder: ExportFolder) -> Shapes:
    return llama_tensors(folder, qkv_bias=False, output_bias=False, head_norm=True, tied=False)


def _windows_off(folder: ExportFolder) -> str | None:
    if "sliding_window" not in folder.config or folder.config["sliding_window"] is not None:
        return "config.json must have sliding_window: null"
    return field_is("use_sliding_window", False)(folder)


CHECKS: dict[str, Check] = {
    **COMMON,
    "architecture": Check("Engines choose their model class by it.", field_is("architectures", ["SDARForCausalLM"])),
    "model type": Check("transformers chooses the config class by it.", field_is("model_type", "sdar")),
    "code": Check(
        "transformers loads the classes from these files, on machines without GPU kernels.", remote_code_loads
    ),
    "config code": Check(
        "Without a plain attribute an engine raises, or silently takes 10000.", config_keeps_rope_theta
    ),
    "auto map": Check("Without it transformers knows no such class.", field_is("auto_map", _AUTO_MAP)),
    "mask id": Check("Two engines hard-code 151669.", field_is("mask_token_id", SDAR_MASK_ID)),
    "untied head": Check("One engine raises KeyError on tied weights.", field_is("tie_word_embeddings", False)),
    "windows": Check("An absent field turns a sliding window on in some versions.", _windows_off),
    "pad token": Check("Engines read it without a default.", fields_are_of({"pad_token_id": int})),
    "tensors": Check(
        "A name that an engine does not know is an error, a missing one is random.", tensors_are(_expected)
    ),
    "mask row": Check("A row near zero makes every masked position alike noise.", mask_row_is_trained(EMBEDDING)),
    "head mask row": Check(
        "Engines do not ban the mask; a model that predicts it may never finish.", head_never_says_mask
    ),
    "launch line": Check(
        "Unless told, the engines' block size is 4 and one request runs at a time.",
        readme_tells(
            "--dllm-algorithm LowConfidence --dllm-algorithm-config",
            "block_size: {block_size}",
            "--max-running-requests",
            "--dllm-block-length {block_size} --dllm-unmasking-strategy low_confidence_dynamic",
        ),
    ),
}
