"""Bits per token of held-out text: exact on the causal stream, a bound under block diffusion."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ar2diff.data.stream import PackedRow
from ar2diff.diffusion.likelihood import bits_per_token, draw_bound_noise
from ar2diff.diffusion.noise import BlockNoise, Bools
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.decoder import Decoder
from ar2diff.seeding import keyed_generator
from ar2diff.train.batch import BatchSettings, TrainingBatch, build_batch
from ar2diff.train.step import forward_nll


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Bits per response token; both count the same tokens, each response's first one left out if it has no prompt."""

    ar_bits: float
    bound_bits: float
    num_tokens: int


@torch.no_grad()
def measure_likelihood(
    decoder: Decoder,
    rows: Sequence[PackedRow],
    diffusion: DiffusionConfig,
    *,
    end_token_id: int,
    block_size: int,
    num_draws: int,
    seed: int,
) -> Likelihood:
    """Bits per response token over `rows`, one row at a time.

    Args:
        decoder: its clean stream must be causal where `diffusion.shift_logits` is set.
        block_size: of the bound; at 1 the bound is exact.
        num_draws: draws of masks that the bound averages over.
    """
    settings = BatchSettings(
        block_size=block_size,
        shift_logits=diffusion.shift_logits,
        clean_attention=diffusion.clean_attention,
        mask_token_id=diffusion.mask_token_id,
        end_token_id=end_token_id,
        nelbo_weighted=True,
        with_causal=True,
    )
    ar_nats, bound_nats, num_tokens = 0.0, 0.0, 0
    for draw in range(num_draws):

        def draw_noise(supervised_NS: Bools, row_id: int, draw: int = draw) -> BlockNoise:
            generator = keyed_generator("bound", seed, draw, row_id)
            return draw_bound_noise(supervised_NS, shift_logits=diffusion.shift_logits, generator=generator)

        for row in rows:
            batch = build_batch([row], settings, draw_noise)
            _, nll_P = forward_nll(decoder, batch, batch.weights_P, mask_token_id=diffusion.mask_token_id)
            weighted_P = (nll_P.cpu() * batch.weights_P).double()
            causal_P = weighted_P[batch.num_diffusion :]
            ar_nats += float(causal_P.sum())
            anchors_P = _is_anchor(batch, block_size) if diffusion.shift_logits else torch.zeros_like(causal_P)
            bound_nats += float(weighted_P[: batch.num_diffusion].sum() + (causal_P * anchors_P).sum())
            num_tokens += batch.num_causal
    return Likelihood(
        ar_bits=bits_per_token(ar_nats, num_tokens),
        bound_bits=bits_per_token(bound_nats, num_tokens),
        num_tokens=num_tokens // num_draws,
    )


def _is_anchor(batch: TrainingBatch, block_size: int) -> torch.Tensor:
    # The token after a causal position is an anchor where a block begins.
    target_at_P = batch.logit_idx_P[batch.num_diffusion :] + 1
    places = batch.layout.places
    prompt_lens = torch.tensor(batch.layout.prompt_lens)[places.document_idx[target_at_P]]
    return (places.position_idx[target_at_P] - prompt_lens) % block_size == 0
