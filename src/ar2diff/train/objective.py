"""What is learnt: block size, views, noise and loss weights as one config; published objectives as presets."""

import math
from dataclasses import dataclass, field
from typing import Literal

from ar2diff.diffusion.noise import NoiseConfig
from ar2diff.errors import ConfigError
from ar2diff.models.config import CleanAttention

BlockSchedule = Literal["grow", "mix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """A training objective.

    Attributes:
        block_sizes: trained block sizes, ascending; the largest is the checkpoint's.
        block_schedule: with several sizes, "grow" gives each an equal share of the run in order, "mix" takes turns.
        shift_logits: whether the logit at position i predicts token i + 1, as in an AR model.
        clean_attention: "causal" keeps the clean stream an AR model, "block" is bidirectional inside a block.
        noise: how noisy views are drawn.
        nelbo_weighted: weight masked tokens by the likelihood bound instead of uniformly.
        ar_weight: weight of the clean stream's next-token loss on response tokens; needs causal clean attention.
    """

    block_sizes: tuple[int, ...] = (8,)
    block_schedule: BlockSchedule = "grow"
    shift_logits: bool = True
    clean_attention: CleanAttention = "causal"
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    nelbo_weighted: bool = False
    ar_weight: float = 0.5

    def __post_init__(self) -> None:
        sizes = self.block_sizes
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ConfigError("block_sizes must be ascending and at least 1", given=sizes)
        if self.block_schedule not in ("grow", "mix"):
            raise ConfigError("block_schedule is grow or mix", given=self.block_schedule)
        if self.clean_attention not in ("causal", "block"):
            raise ConfigError("clean_attention is causal or block", given=self.clean_attention)
        if not 0 <= self.ar_weight < math.inf:
            raise ConfigError("ar_weight must be finite and not negative", given=self.ar_weight)
        if self.ar_weight and self.clean_attention != "causal":
            raise ConfigError(
                "the clean stream has a next-token loss only under causal attention",
                given=f"ar_weight = {self.ar_weight}",
                fix="Set ar_weight to 0 or clean_attention to causal",
            )
        if self.noise.anchor_mask_rate and not self.shift_logits:
            raise ConfigError(
                "only shifted models have anchors", given=f"anchor_mask_rate {self.noise.anchor_mask_rate}"
            )

    def block_size_at(self, step: int, progress: float) -> int:
        """The block size of one step; `progress` in [0, 1] is the share of the run that lies before it."""
        count = len(self.block_sizes)
        if self.block_schedule == "mix":
            return self.block_sizes[step % count]
        return self.block_sizes[min(int(progress * count), count - 1)]


def _single_view(**settings: float) -> NoiseConfig:
    return NoiseConfig(num_views=1, complementary=False, **settings)  # type: ignore[arg-type]


# Peers' objectives as far as they are settings of ours; other differences (rows, prompts, kernels) are not here.
PRESETS: dict[str, ObjectiveConfig] = {
    "ar2diff": ObjectiveConfig(),
    # Block drafts in one pass, verified by the causal stream: every block is seen as decoding first sees it.
    "draft": ObjectiveConfig(noise=NoiseConfig(all_mask_share=1.0)),
    # Arriola et al., 2025: one view, likelihood weights, a block-causal clean copy.
    "bd3lm": ObjectiveConfig(
        block_sizes=(4,),
        shift_logits=False,
        clean_attention="block",
        noise=_single_view(t_min=0.001),
        nelbo_weighted=True,
        ar_weight=0.0,
    ),
    # The dLLM library's BD3LM recipe: the same at block size 32.
    "dllm": ObjectiveConfig(
        block_sizes=(32,),
        shift_logits=False,
        clean_attention="block",
        noise=_single_view(t_min=0.001),
        nelbo_weighted=True,
        ar_weight=0.0,
    ),
    # Wu et al., 2025: complementary views and shifted logits, block 32, uniform weights.
    "fast-dllm-v2": ObjectiveConfig(
        block_sizes=(32,), clean_attention="block", noise=NoiseConfig(t_min=0.001), ar_weight=0.0
    ),
    # Cheng et al., 2025: block size 4, unshifted, likelihood weights.
    "sdar": ObjectiveConfig(
        block_sizes=(4,),
        shift_logits=False,
        clean_attention="block",
        noise=_single_view(t_min=0.001),
        nelbo_weighted=True,
        ar_weight=0.0,
    ),
}


def find_preset(name: str) -> ObjectiveConfig:
    """The preset of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PRESETS:
        raise ConfigError("unknown objective preset", given=name, fix=f"Use one of {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
