"""What a decoder is made of, and what a converted checkpoint adds to it. Free of torch."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from ar2diff.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh"]
NormPlacement = Literal["pre", "post", "sandwich"]
CleanAttention = Literal["causal", "block"]
Anchor = Literal["predicted", "last"]
# No model comes near; a damaged config.json is found before anything of that size is built.
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama-3 frequency scaling: long wavelengths are stretched by `factor`, short ones kept, between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ConfigError("the rope scaling factor must be positive and finite", given=self.factor)
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            given = f"{self.low_freq_factor} and {self.high_freq_factor}"
            raise ConfigError("rope scaling needs 0 < low_freq_factor < high_freq_factor", given=given)
        if not 1 <= self.original_max_seq_len <= MAX_SIZE:
            raise ConfigError(
                f"original_max_position_embeddings must lie between 1 and {MAX_SIZE}", given=self.original_max_seq_len
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder and the few switches in which the supported families differ.

    Attributes:
        attention_scale: factor on q.k before softmax; None means head_dim ** -0.5.
        norm_placement: "pre" norms each sublayer's input, "post" its output (OLMo 2), "sandwich" both (Gemma 3).
        norm_offset: added to every norm weight (1.0 where the family stores weight - 1).
        qk_norm: None, "head" (over head_dim, after the split) or "flat" (over all heads, before it).
        rope_layers: per layer whether rotary positions apply (SmolLM3 leaves some out); None means all.
        embedding_scale, residual_scale, logit_scale: the multipliers of Granite and MiniCPM; 1.0 is none.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rope_layers: tuple[bool, ...] | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    norm_placement: NormPlacement = "pre"
    norm_offset: float = 0.0
    qk_norm: Literal["head", "flat"] | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_seq_len"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ConfigError(f"{name} must lie between 1 and {MAX_SIZE}", given=getattr(self, name))
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(f"num_layers must be at most {MAX_LAYERS}", given=self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_heads must be a multiple of num_kv_heads", given=f"{self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError("head_dim must be even for rotary positions", given=self.head_dim)
        for name in ("norm_eps", "rope_theta", "embedding_scale", "residual_scale", "logit_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive and finite", given=getattr(self, name))
        if self.rope_layers is not None and len(self.rope_layers) != self.num_layers:
            raise ConfigError("rope_layers must have an entry per layer", given=len(self.rope_layers))

    @property
    def softmax_scale(self) -> float:
        """The factor on q.k before softmax."""
        return self.attention_scale if self.attention_scale is not None else 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConfig:
    """What belongs to a converted checkpoint and is never chosen at call time.

    Attributes:
        block_size: tokens per diffusion block, the one decoding uses unless asked for another trained one.
        trained_block_sizes: every block size that training used, ascending.
        shift_logits: True where the logit at position i predicts token i + 1.
        mask_token_id: the embedding row of MASK; its logit is -inf everywhere.
        clean_attention: "causal" makes the clean stream an AR model; "block" is bidirectional inside a block.
        anchor: what a shifted model's block begins with. "predicted": its first token, as the clean stream predicts
            it. "last": the token before it, so that the block is that token and `block_size` - 1 new ones, and all
            new ones are the noisy stream's. Under a mask-gated adapter that is the difference between answers with
            every eighth token the parent's and answers that are all the adapter's.
    """

    block_size: int
    trained_block_sizes: tuple[int, ...]
    shift_logits: bool
    mask_token_id: int
    clean_attention: CleanAttention
    anchor: Anchor = "predicted"

    def __post_init__(self) -> None:
        if self.block_size < 1 or any(size < 1 for size in self.trained_block_sizes):
            raise ConfigError("block sizes must be at least 1", given=self.trained_block_sizes or self.block_size)
        if list(self.trained_block_sizes) != sorted(set(self.trained_block_sizes)):
            raise ConfigError("trained_block_sizes must ascend", given=self.trained_block_sizes)
        if self.block_size not in self.trained_block_sizes:
            raise ConfigError(
                "block_size must be among trained_block_sizes", given=f"{self.block_size}, {self.trained_block_sizes}"
            )
        if self.mask_token_id < 0:
            raise ConfigError("mask_token_id must not be negative", given=self.mask_token_id)
        if self.clean_attention not in ("causal", "block"):
            raise ConfigError("clean_attention is causal or block", given=self.clean_attention)
        check_anchor(
            self.anchor,
            self.trained_block_sizes[0],
            shift_logits=self.shift_logits,
            clean_attention=self.clean_attention,
        )

    def as_json(self) -> dict[str, Any]:
        """The object stored under `ar2diff` in a checkpoint's config.json."""
        return {
            "block_size": self.block_size,
            "trained_block_sizes": list(self.trained_block_sizes),
            "shift_logits": self.shift_logits,
            "mask_token_id": self.mask_token_id,
            "clean_attention": self.clean_attention,
            # Left out where it is what every checkpoint had before there was a choice.
            **({} if self.anchor == "predicted" else {"anchor": self.anchor}),
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "DiffusionConfig":
        """Read what `as_json` wrote; a missing or unknown key is an error, never a default.

        But for `anchor`, which older checkpoints do not have.
        """
        kinds = {
            "block_size": int,
            "trained_block_sizes": list,
            "shift_logits": bool,
            "mask_token_id": int,
            "clean_attention": str,
        }
        if isinstance(stored, dict) and "anchor" in stored:
            kinds["anchor"] = str
        if not isinstance(stored, dict) or set(stored) != set(kinds):
            given = sorted(stored) if isinstance(stored, dict) else stored
            raise ConfigError("the checkpoint's diffusion settings are incomplete or unknown", given=given)
        sizes = stored["trained_block_sizes"]
        wrong = [name for name, kind in kinds.items() if type(stored[name]) is not kind]
        if wrong or any(type(size) is not int for size in sizes):
            raise ConfigError("the checkpoint's diffusion settings have a wrong type", given=wrong or sizes)
        return cls(**{**stored, "trained_block_sizes": tuple(sizes)})


def check_anchor(anchor: str, block_size: int, *, shift_logits: bool, clean_attention: str) -> None:
    """Refuse an anchor that the other settings leave no room for.

    Raises:
        ConfigError: see above.
    """
    if anchor not in ("predicted", "last"):
        raise ConfigError("anchor is predicted or last", given=anchor)
    if anchor == "last" and (not shift_logits or clean_attention != "causal" or block_size < 2):
        raise ConfigError(
            "blocks that begin with the token before them need shifted logits, causal clean attention and two places",
            given=f"shift_logits {shift_logits}, clean_attention {clean_attention}, block size {block_size}",
            fix="Set anchor to predicted",
        )
