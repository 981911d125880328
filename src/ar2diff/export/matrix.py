"""Which export targets a conversion leaves open: a pure function of the base's config and the conversion's settings.

Each target is an engine's own model class, so what it computes is fixed: its attention, its shift, its mask id. A
target is open only where that is what the converted model computes. Free of torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ar2diff.models.config import CleanAttention, DecoderConfig

SDAR_MASK_ID = 151669
FAST_DLLM_MASK_ID = 151665
# LLaDA2's own vocabulary ends here; its last row is the mask.
LLADA2_VOCAB_SIZE = 156_896
LLAMA_SHAPED = ("llama", "mistral")
GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What decides the targets.

    Attributes:
        decoder: of the base.
        shift_logits, mask_token_id, clean_attention: as of `DiffusionConfig`.
    """

    decoder: DecoderConfig
    shift_logits: bool
    mask_token_id: int
    clean_attention: CleanAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A format.

    Attributes:
        engines: which programs read it.
        find_obstacles: why a conversion cannot be written so; nothing where it can.
        note: what a user should know of an open one.
    """

    engines: str
    find_obstacles: Callable[[Conversion], Iterator[str]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """A target for one conversion; open where `reasons` is empty."""

    name: str
    engines: str
    note: str
    reasons: tuple[str, ...]

    @property
    def is_open(self) -> bool:
        """Whether the conversion can be exported so."""
        return not self.reasons


def list_targets(conversion: Conversion) -> tuple[TargetState, ...]:
    """Every target, open or closed, with the reason for each closed one."""
    return tuple(
        TargetState(
            name=name, engines=target.engines, note=target.note, reasons=tuple(target.find_obstacles(conversion))
        )
        for name, target in TARGETS.items()
    )


def _sdar(conversion: Conversion) -> Iterator[str]:
    decoder = conversion.decoder
    if decoder.model_type != "qwen3":
        yield f"SDAR is a Qwen3 with its query and key norms, the base is {decoder.model_type}"
    if decoder.rope_scaling is not None:
        yield "its engines know no rope scaling"
    yield from _needs_shift(conversion, wanted=False)
    yield from _needs_mask(conversion, SDAR_MASK_ID)
    yield from _needs_block_attention(conversion)


def _fast_dllm(conversion: Conversion) -> Iterator[str]:
    decoder = conversion.decoder
    if decoder.model_type != "qwen2":
        yield f"Fast-dLLM v2 is a Qwen2 with biased q, k and v, the base is {decoder.model_type}"
    yield from _needs_shift(conversion, wanted=True)
    yield from _needs_mask(conversion, FAST_DLLM_MASK_ID)
    yield from _needs_block_attention(conversion)


def _stable_diffcoder(conversion: Conversion) -> Iterator[str]:
    decoder = conversion.decoder
    if decoder.model_type not in (*LLAMA_SHAPED, "qwen2"):
        yield f"Stable-DiffCoder is Llama-shaped, the base is {decoder.model_type}"
    yield from _needs_plain_stack(decoder)
    yield from _needs_shift(conversion, wanted=False)
    yield from _needs_block_attention(conversion)


def _dense_llada2(conversion: Conversion) -> Iterator[str]:
    decoder = conversion.decoder
    if decoder.model_type not in (*LLAMA_SHAPED, "qwen2", "qwen3"):
        yield f"a dense LLaDA2 is Llama-, Qwen2- or Qwen3-shaped, the base is {decoder.model_type}"
    yield from _needs_plain_stack(decoder)
    if conversion.mask_token_id != LLADA2_VOCAB_SIZE - 1 and decoder.vocab_size >= LLADA2_VOCAB_SIZE:
        yield f"its mask is row {LLADA2_VOCAB_SIZE - 1}, which the base's {decoder.vocab_size} rows use"
    yield from _needs_shift(conversion, wanted=False)
    yield from _needs_block_attention(conversion)


def _gguf(conversion: Conversion) -> Iterator[str]:
    if conversion.decoder.model_type not in GGUF_FAMILIES:
        yield f"written for {', '.join(GGUF_FAMILIES)}, the base is {conversion.decoder.model_type}"


def _none(_: Conversion) -> Iterator[str]:
    yield from ()


def _needs_shift(conversion: Conversion, *, wanted: bool) -> Iterator[str]:
    if conversion.shift_logits is not wanted:
        words = {True: "the next token (shift_logits = true)", False: "their own position (shift_logits = false)"}
        yield f"its logits predict {words[wanted]}"


def _needs_mask(conversion: Conversion, wanted: int) -> Iterator[str]:
    if conversion.mask_token_id != wanted:
        yield f"its engines take id {wanted} as the mask, this one is {conversion.mask_token_id}"


def _needs_block_attention(conversion: Conversion) -> Iterator[str]:
    # Such an engine caches a finished block's keys as they are computed with the whole block in sight.
    if conversion.clean_attention != "block":
        yield "its finished blocks are bidirectional inside (clean_attention = block)"


def _needs_plain_stack(decoder: DecoderConfig) -> Iterator[str]:
    if decoder.output_bias or decoder.mlp_bias:
        yield "it has no bias on o and the MLP"
    if decoder.rope_scaling is not None or decoder.rope_layers is not None:
        yield "it has plain rotary positions in every layer"


TARGETS: dict[str, Target] = {
    "sdar": Target(engines="SGLang, LMDeploy, JetEngine, Diffulex, transformers", find_obstacles=_sdar),
    "fast-dllm-v2": Target(engines="transformers, Diffulex", find_obstacles=_fast_dllm),
    "stable-diffcoder": Target(engines="Diffulex", find_obstacles=_stable_diffcoder),
    "llada2": Target(
        engines="SGLang", find_obstacles=_dense_llada2, note="experimental: read from source, never run"
    ),
    "hf": Target(engines="transformers with its own remote code", find_obstacles=_none),
    "gguf": Target(engines="llama.cpp bindings", find_obstacles=_gguf),
}
