"""A dense model in LLaDA2's format, for SGLang. Written from its description, never run there: experimental."""

import torch
from torch import Tensor

from ar2diff.export.layout import Layout, base_facts, head_without_mask, render_readme, shared_config
from ar2diff.export.matrix import LLADA2_MASK_ID, LLADA2_MIN_VOCAB
from ar2diff.export.source import ExportSource, PlannedTensor
from ar2diff.export.verify import (
    COMMON,
    Check,
    ExportFolder,
    Shapes,
    field_is,
    fields_are_of,
    head_never_says_mask,
    mask_row_is_trained,
    readme_tells,
    tensors_are,
)

_BODY = """
**Experimental**: written from the format's description; no engine has run it yet.

## SGLang

The engine's own block size is 32; this model's is {block_size}. Put it into `algo.yaml`:

```yaml
block_size: {block_size}
```

```bash
python -m sglang.launch_server --model-path FOLDER --trust-remote-code \\
  --dllm-algorithm LowConfidence --dllm-algorithm-config algo.yaml --max-running-requests 8
```

The vocabulary is padded with zero rows to hold the mask at 156895, which the engine hard-codes.
"""


def lay_out(source: ExportSource) -> Layout:
    """The folder in LLaDA2's format, every layer dense."""
    diffusion, model = source.diffusion, source.config
    vocab_size = max(LLADA2_MIN_VOCAB, model.vocab_size)
    config = {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        **shared_config(source),
        "vocab_size": vocab_size,
        "mask_token_id": LLADA2_MASK_ID,
        "first_k_dense_replace": model.num_layers,
        "use_qk_norm": model.qk_norm == "head",
        "use_qkv_bias": model.qkv_bias,
        "use_bias": False,
        "partial_rotary_factor": 1.0,
        "rotary_dim": model.head_dim,
        # Read, though no layer has experts.
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "num_shared_experts": 0,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": model.intermediate_size,
    }
    facts = {**base_facts(source), "mask token id": str(LLADA2_MASK_ID)}
    return Layout(
        config=config,
        tensors=_plan(source, vocab_size),
        mask_token_id=LLADA2_MASK_ID,
        readme=render_readme(
            "Block diffusion, in LLaDA2's format", facts, _BODY.format(block_size=diffusion.block_size)
        ),
    )


def _plan(source: ExportSource, vocab_size: int) -> list[PlannedTensor]:
    shape = (vocab_size, source.config.hidden_size)
    tensors = [
        PlannedTensor(
            name="model.word_embeddings.weight",
            shape=shape,
            build=lambda: _grow(source.read("embedding.weight"), source.diffusion.mask_token_id, vocab_size),
        ),
        source.plan("final_norm.weight", "model.norm.weight"),
        PlannedTensor(
            name="lm_head.weight",
            shape=shape,
            build=lambda: _grow(head_without_mask(source), source.diffusion.mask_token_id, vocab_size),
        ),
    ]
    for idx in range(source.config.num_layers):
        tensors += _plan_layer(source, idx)
    return tensors


def _plan_layer(source: ExportSource, idx: int) -> list[PlannedTensor]:
    ours, theirs = f"layers.{idx}", f"model.layers.{idx}"
    renamed = {
        f"{ours}.attention_in_norm.weight": f"{theirs}.input_layernorm.weight",
        f"{ours}.mlp_in_norm.weight": f"{theirs}.post_attention_layernorm.weight",
        f"{ours}.attention.o_proj.weight": f"{theirs}.attention.dense.weight",
        **{f"{ours}.mlp.{part}_proj.weight": f"{theirs}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    }
    if source.config.qk_norm == "head":
        renamed[f"{ours}.attention.q_norm.weight"] = f"{theirs}.attention.query_layernorm.weight"
        renamed[f"{ours}.attention.k_norm.weight"] = f"{theirs}.attention.key_layernorm.weight"
    kinds = ("weight", "bias") if source.config.qkv_bias else ("weight",)
    return [
        *(_plan_fused(source, ours, f"{theirs}.attention.query_key_value.{kind}", kind) for kind in kinds),
        *(source.plan(ours_name, name) for ours_name, name in renamed.items()),
    ]


def _plan_fused(source: ExportSource, layer: str, name: str, kind: str) -> PlannedTensor:
    parts = [f"{layer}.attention.{part}_proj.{kind}" for part in ("q", "k", "v")]
    shapes = [source.shape(part) for part in parts]
    return PlannedTensor(
        name=name,
        shape=(sum(shape[0] for shape in shapes), *shapes[0][1:]),
        build=lambda: torch.cat([source.read(part) for part in parts]),
    )


def _grow(rows: Tensor, mask_token_id: int, vocab_size: int) -> Tensor:
    """Padded with zero rows, the mask's row moved to where the engine expects it."""
    grown = rows.new_zeros(vocab_size, rows.shape[1])
    grown[: len(rows)] = rows
    if mask_token_id != LLADA2_MASK_ID:
        grown[LLADA2_MASK_ID] = rows[mask_token_id]
        grown[mask_token_id] = 0.0
    return grown


def _expected(folder: ExportFolder) -> Shapes:
    hidden, inner, vocab = (folder.number(key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    head = folder.number("head_dim")
    queries, keys = folder.number("num_attention_heads") * head, folder.number("num_key_value_heads") * head
    shapes: Shapes = {
        "model.word_embeddings.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for idx in range(folder.number("num_hidden_layers")):
        at = f"model.layers.{idx}"
        shapes |= {f"{at}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes[f"{at}.attention.query_key_value.weight"] = (queries + 2 * keys, hidden)
        shapes[f"{at}.attention.dense.weight"] = (hidden, queries)
        shapes |= {f"{at}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        if folder.config.get("use_qkv_bias") is True:
            shapes[f"{at}.attention.query_key_value.bias"] = (queries + 2 * keys,)
        if folder.config.get("use_qk_norm") is True:
            shapes |= {f"{at}.attention.{part}_layernorm.weight": (head,) for part in ("query", "key")}
    return shapes


def _is_dense(folder: ExportFolder) -> str | None:
    return field_is("first_k_dense_replace", folder.number("num_hidden_layers"))(folder)


def _is_padded(folder: ExportFolder) -> str | None:
    vocab = folder.number("vocab_size")
    return None if vocab >= LLADA2_MIN_VOCAB else f"vocab_size is {vocab}, below {LLADA2_MIN_VOCAB}"


CHECKS: dict[str, Check] = {
    **COMMON,
    "architecture": Check("The engine chooses its class by it.", field_is("architectures", ["LLaDA2MoeModelLM"])),
    "dense": Check("A layer beyond it is taken for a mixture of experts.", _is_dense),
    "switches": Check(
        "They say which tensors there are.",
        fields_are_of({"use_qk_norm": bool, "use_qkv_bias": bool, "use_bias": bool, "pad_token_id": int}),
    ),
    "rotary": Check("The engine's own factor rotates half of a head.", field_is("partial_rotary_factor", 1.0)),
    "vocabulary": Check("The mask id would be beyond the embedding.", _is_padded),
    "mask id": Check("The engine hard-codes 156895.", field_is("mask_token_id", LLADA2_MASK_ID)),
    "untied head": Check(
        "The head's mask row must differ from the embedding's.", field_is("tie_word_embeddings", False)
    ),
    "tensors": Check("A name that the engine does not know is an error.", tensors_are(_expected)),
    "mask row": Check(
        "A row near zero makes every masked position alike noise.",
        mask_row_is_trained("model.word_embeddings.weight"),
    ),
    "head mask row": Check("The engine does not ban the mask.", head_never_says_mask),
    "launch line": Check("The engine's block size is 32 unless told.", readme_tells("block_size: {block_size}")),
}
