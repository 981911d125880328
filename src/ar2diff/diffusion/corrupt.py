"""A document's response cut into blocks, masked as its noise says, with every position that carries a loss.

With `shift_logits` the logit at position i predicts token i + 1: a masked position is predicted by the position
before it in its own view, and a block's first token (its anchor) by the clean stream. Without, a masked position
predicts itself.

Shape letters: L clean tokens, N blocks, S block, K views, P loss positions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ar2diff.diffusion.noise import BlockNoise, Bools, Floats

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseBlocks:
    """The response of one document in blocks.

    Attributes:
        token_ids_NS: its tokens; the last block is filled with the end token.
        supervised_NS: tokens that carry a diffusion loss when masked: no filler, and no anchor of a shifted model.
    """

    token_ids_NS: Ints
    supervised_NS: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPositions:
    """Where logits are needed: hidden state `logit_idx` predicts `target_ids` with weight `weights`; all (P,)."""

    logit_idx: Ints
    target_ids: Ints
    weights: Floats


def cut_response(
    token_ids_L: Ints, prompt_len: int, *, block_size: int, end_token_id: int, shift_logits: bool
) -> ResponseBlocks:
    """Cut the response into blocks from its first token on, the last one filled up."""
    response = token_ids_L[prompt_len:]
    num_blocks = -(-len(response) // block_size)
    filled = np.full(num_blocks * block_size, end_token_id, dtype=np.int64)
    filled[: len(response)] = response
    supervised_NS = (np.arange(len(filled)) < len(response)).reshape(num_blocks, block_size)
    if shift_logits:
        supervised_NS[:, 0] = False
    return ResponseBlocks(token_ids_NS=filled.reshape(num_blocks, block_size), supervised_NS=supervised_NS)


def corrupt_blocks(blocks: ResponseBlocks, noise: BlockNoise, *, mask_token_id: int) -> Ints:
    """Token ids of the kept noisy blocks, block by block and view by view, shape (kept * S,)."""
    noisy_NKS = np.where(noise.masked_NKS, mask_token_id, blocks.token_ids_NS[:, None])
    return noisy_NKS[noise.kept_NK].reshape(-1)


def diffusion_positions(
    blocks: ResponseBlocks, noise: BlockNoise, *, noisy_start: int, shift_logits: bool, nelbo_weighted: bool
) -> LossPositions:
    """The masked, supervised positions of the kept noisy blocks.

    Args:
        noisy_start: index of the document's first noisy token in the sequence.
        nelbo_weighted: weight by `BlockNoise.weight_NK` instead of uniformly.
    """
    carries_NKS = noise.masked_NKS & blocks.supervised_NS[:, None]
    block, view, offset = np.nonzero(carries_NKS & noise.kept_NK[:, :, None])
    block_size = blocks.token_ids_NS.shape[1]
    order_NK = noise.kept_NK.reshape(-1).cumsum().reshape(noise.kept_NK.shape) - 1
    at = noisy_start + order_NK[block, view] * block_size + offset
    weights = noise.weight_NK[block, view] if nelbo_weighted else np.ones(len(block))
    return LossPositions(
        logit_idx=at - 1 if shift_logits else at, target_ids=blocks.token_ids_NS[block, offset], weights=weights
    )


def causal_positions(token_ids_L: Ints, prompt_len: int, *, start: int) -> LossPositions:
    """Next-token positions of the clean stream: every response token with a token before it, the end included.

    Args:
        start: index of the document's first token in the sequence.
    """
    targets = np.arange(max(prompt_len, 1), len(token_ids_L))
    return LossPositions(
        logit_idx=start + targets - 1, target_ids=token_ids_L[targets], weights=np.ones(len(targets))
    )
