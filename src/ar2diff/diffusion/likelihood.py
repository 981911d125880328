"""How many bits a token costs: exactly on the causal stream, as an upper bound under block diffusion.

The bound masks a uniformly drawn number of a block's tokens, at uniformly drawn places, and weights their loss by
(tokens of the block / tokens masked): the order-agnostic bound (Hoogeboom et al., 2022), which equals the continuous
NELBO and is exact where a block holds one unknown token. A shifted model's anchors are scored by the causal stream,
so block size 1 gives the causal likelihood itself.

Shape letters: N blocks, S block.
"""

import math

import numpy as np

from ar2diff.diffusion.noise import BlockNoise, Bools


def draw_bound_noise(supervised_NS: Bools, *, shift_logits: bool, generator: np.random.Generator) -> BlockNoise:
    """One draw of the bound's masks, as a single view; filler is always masked, as a decoder sees it."""
    num_supervised_N = supervised_NS.sum(axis=1)
    count_N = np.ceil(generator.random(len(supervised_NS)) * num_supervised_N)
    # random() may be exactly 0.
    count_N = np.maximum(count_N, np.minimum(num_supervised_N, 1))
    score_NS = np.where(supervised_NS, generator.random(supervised_NS.shape), np.inf)
    masked_NS = (score_NS.argsort(axis=1).argsort(axis=1) < count_N[:, None]) & supervised_NS
    filler_NS = ~supervised_NS
    if shift_logits:
        filler_NS[:, 0] = False
    weight_N = num_supervised_N / np.maximum(count_N, 1)
    return BlockNoise(
        masked_NKS=(masked_NS | filler_NS)[:, None],
        kept_NK=(num_supervised_N > 0)[:, None],
        weight_NK=weight_N[:, None],
    )


def bits_per_token(total_nats: float, num_tokens: int) -> float:
    """Nats over all tokens as bits for each."""
    return total_nats / (num_tokens * math.log(2.0))
