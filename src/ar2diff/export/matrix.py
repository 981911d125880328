"""What a base can become: per target, what it demands of a model's shape and of its conversion. Free of torch.

A target is open where every demand holds. The demands follow from what the engines of a format compute: where one
would compute something else than this project trained, the target is closed, never approximated.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ar2diff.models.config import DecoderConfig, DiffusionConfig

SDAR_MASK_ID = 151_669
FAST_DLLM_MASK_ID = 151_665
LLADA2_MASK_ID = 156_895
LLADA2_MIN_VOCAB = 156_896


@dataclass(frozen=True, slots=True)
class Demand:
    """One demand of a target: whether it holds, and what is wrong where it does not."""

    holds: Callable[[DecoderConfig, DiffusionConfig], bool]
    otherwise: str


def _is_plain(model: DecoderConfig, _: DiffusionConfig) -> bool:
    scales = (model.embedding_scale, model.residual_scale, model.logit_scale)
    return (
        model.norm_placement == "pre"
        and model.norm_offset == 0.0
        and model.activation == "silu"
        and scales == (1.0, 1.0, 1.0)
        and model.rope_layers is None
        and model.attention_scale is None
        and model.qk_norm != "flat"
        and not model.mlp_bias
    )


PLAIN_STACK = Demand(_is_plain, "the format is a plain Llama stack; this family computes something else")
UNSHIFTED = Demand(
    lambda _, diffusion: not diffusion.shift_logits,
    "its engines read the logit at a masked position for that position, and this model's logits are shifted",
)
SHIFTED = Demand(
    lambda _, diffusion: diffusion.shift_logits,
    "its engines read the logit left of a masked position, and this model's logits are not shifted",
)
PREDICTED_ANCHOR = Demand(
    lambda _, diffusion: diffusion.anchor == "predicted",
    "its decoding takes a block's first token from the clean stream, and this model begins with the last known",
)
# The engines write a finished block into the cache with attention in both directions inside the block.
CLEAN_BLOCK = Demand(
    lambda _, diffusion: diffusion.clean_attention == "block",
    "its engines commit a block with attention in both directions, and this model's clean attention is causal",
)
HEAD_NORM = Demand(
    lambda model, _: model.qk_norm == "head", "it norms every query and key head, and this model does not"
)
NO_NORM = Demand(lambda model, _: model.qk_norm is None, "it has no norm on query and key heads, and this model has")
NO_BIAS = Demand(lambda model, _: not (model.qkv_bias or model.output_bias), "it has no biases, and this model has")
QKV_BIAS = Demand(
    lambda model, _: model.qkv_bias and not model.output_bias, "it has biases on q, k and v alone, as Qwen2 does"
)
NO_OUTPUT_BIAS = Demand(lambda model, _: not model.output_bias, "it has no bias on the attention output")
PLAIN_ROPE = Demand(lambda model, _: model.rope_scaling is None, "it has no rope scaling, and this model has")


def _mask_is(wanted: int) -> Demand:
    return Demand(
        lambda _, diffusion: diffusion.mask_token_id == wanted,
        f"its engines hard-code mask id {wanted}, and this model masks with another one",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One export format.

    Attributes:
        engines: what runs it.
        demands: all must hold.
        needs_merge: whether a mask-gated adapter must be merged first.
        is_checked: False where no engine has run it here: the format is written from its description alone.
    """

    engines: str
    demands: tuple[Demand, ...]
    needs_merge: bool = True
    is_checked: bool = True


TARGETS: dict[str, Target] = {
    "sdar": Target(
        engines="SGLang, LMDeploy, JetEngine, Diffulex, transformers",
        demands=(PLAIN_STACK, HEAD_NORM, NO_BIAS, PLAIN_ROPE, UNSHIFTED, CLEAN_BLOCK, _mask_is(SDAR_MASK_ID)),
        is_checked=False,
    ),
    "fast-dllm-v2": Target(
        engines="transformers, Diffulex",
        demands=(PLAIN_STACK, NO_NORM, QKV_BIAS, PLAIN_ROPE, SHIFTED, CLEAN_BLOCK, _mask_is(FAST_DLLM_MASK_ID)),
        is_checked=False,
    ),
    "stable-diffcoder": Target(
        engines="transformers, Diffulex",
        demands=(PLAIN_STACK, NO_NORM, PLAIN_ROPE, UNSHIFTED, CLEAN_BLOCK),
        is_checked=False,
    ),
    "llada2-dense": Target(
        engines="SGLang",
        demands=(PLAIN_STACK, NO_OUTPUT_BIAS, PLAIN_ROPE, UNSHIFTED, CLEAN_BLOCK),
        is_checked=False,
    ),
    "hf": Target(engines="transformers", demands=(PREDICTED_ANCHOR,)),
    "gguf": Target(
        engines="llama.cpp",
        demands=(
            PLAIN_STACK,
            PLAIN_ROPE,
            PREDICTED_ANCHOR,
            Demand(
                lambda model, _: model.model_type in ("llama", "qwen2", "qwen3"),
                "only Llama and Qwen files are written",
            ),
            Demand(
                lambda model, _: model.model_type != "qwen2" or model.num_heads * model.head_dim == model.hidden_size,
                "llama.cpp's Qwen2 has heads of the hidden size over their number, and this model has others",
            ),
        ),
    ),
    "adapter": Target(engines="ar2diff, PEFT", demands=(), needs_merge=False),
}


def list_closed_reasons(target: str, model: DecoderConfig, diffusion: DiffusionConfig) -> list[str]:
    """Why a target is closed to a model, one clause a reason; empty where it is open.

    Args:
        target: a name in `TARGETS`.
    """
    return [demand.otherwise for demand in TARGETS[target].demands if not demand.holds(model, diffusion)]


def list_open_targets(model: DecoderConfig, diffusion: DiffusionConfig) -> list[str]:
    """The targets that are open to a model, in the table's order."""
    return [name for name in TARGETS if not list_closed_reasons(name, model, diffusion)]
