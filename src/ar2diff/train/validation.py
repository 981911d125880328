"""Held-out text: bits per token, exact on the causal stream and a bound under block diffusion; masked accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ar2diff.data.stream import PackedRow
from ar2diff.diffusion.likelihood import bits_per_token, draw_bound_noise
from ar2diff.diffusion.loss import DEFAULT_CHUNK_SIZE
from ar2diff.diffusion.noise import BlockNoise, Bools, NoiseConfig
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.decoder import Decoder
from ar2diff.seeding import keyed_generator
from ar2diff.train.batch import BatchSettings, TrainingBatch, build_batch, keyed_noise
from ar2diff.train.forward import forward_states
from ar2diff.train.step import forward_nll


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Bits per response token.

    Where blocks begin with the last token (`DiffusionConfig.anchor`), the bound still takes a block's first token
    from the clean stream, as training lays blocks out; decoding by diffusion does not.

    Both count the same tokens, but for the first one of a document without a prompt: only the bound of an unshifted
    model can score it, and counts it then.

    Attributes:
        num_tokens: those that `ar_bits` counts.
    """

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
        anchor=diffusion.anchor,
    )
    ar_nats, bound_nats, num_tokens, num_bound = 0.0, 0.0, 0, 0
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
            num_bound += batch.num_causal if diffusion.shift_logits else batch.diffusion_scale
    return Likelihood(
        ar_bits=bits_per_token(ar_nats, num_tokens),
        bound_bits=bits_per_token(bound_nats, num_bound),
        num_tokens=num_tokens // num_draws,
    )


def _is_anchor(batch: TrainingBatch, block_size: int) -> torch.Tensor:
    # The token after a causal position is an anchor where a block begins.
    offset_P, _ = _block_offsets(batch, block_size, shift_logits=True)
    return offset_P[batch.num_diffusion :] == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetScores:
    """Response tokens predicted under masks, by their place in the block; each list has `block_size` entries.

    Attributes:
        num_tokens: how many were predicted.
        num_right: how many of them were the model's most likely token.
        num_unbroken: how many of them were right together with all masked tokens directly before them in their
            block: where all are masked, what a one-pass draft gets accepted if the true text is the AR path.
        nats: the sum of their cross-entropy.
    """

    num_tokens: tuple[int, ...]
    num_right: tuple[int, ...]
    num_unbroken: tuple[int, ...]
    nats: tuple[float, ...]


@torch.no_grad()
def measure_offsets(
    decoder: Decoder,
    rows: Sequence[PackedRow],
    diffusion: DiffusionConfig,
    noise: NoiseConfig,
    *,
    end_token_id: int,
    block_size: int,
    seed: int,
) -> OffsetScores:
    """How well masked tokens are predicted at each place of a block, given the true text before it.

    A shifted model's anchors, place 0, are predicted by its clean stream, as decoding with predicted anchors does.

    Args:
        noise: what is masked; `NoiseConfig(all_mask_share=1.0)` is the first pass over every block.
    """
    settings = BatchSettings(
        block_size=block_size,
        shift_logits=diffusion.shift_logits,
        clean_attention=diffusion.clean_attention,
        mask_token_id=diffusion.mask_token_id,
        end_token_id=end_token_id,
        nelbo_weighted=False,
        with_causal=diffusion.shift_logits,
        anchor=diffusion.anchor,
    )
    draw = keyed_noise(noise, shift_logits=diffusion.shift_logits, seed=seed, step=0)
    sums_4S = torch.zeros(4, block_size, dtype=torch.float64)
    for row in rows:
        batch = build_batch([row], settings, draw)
        offset_P, counts_P = _block_offsets(batch, block_size, shift_logits=diffusion.shift_logits)
        is_right_P, nats_P = _score_targets(decoder, batch, diffusion.mask_token_id)
        unbroken_P = _mark_unbroken(is_right_P, batch, offset_P)
        scores_4P = torch.stack((torch.ones_like(nats_P), is_right_P.double(), unbroken_P.double(), nats_P))
        sums_4S.index_add_(1, offset_P[counts_P], scores_4P[:, counts_P])
    num_tokens, num_right, num_unbroken, nats = sums_4S.tolist()
    return OffsetScores(
        num_tokens=tuple(map(int, num_tokens)),
        num_right=tuple(map(int, num_right)),
        num_unbroken=tuple(map(int, num_unbroken)),
        nats=tuple(nats),
    )


def _score_targets(decoder: Decoder, batch: TrainingBatch, mask_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Whether each target is the most likely token, and its nats.
    hidden_PE = forward_states(decoder, batch).at_positions_PE
    rights, nats = [], []
    for start in range(0, len(hidden_PE), DEFAULT_CHUNK_SIZE):
        chunk = slice(start, start + DEFAULT_CHUNK_SIZE)
        hidden_CE, targets_C = hidden_PE[chunk], batch.target_ids_P[chunk]
        logits_CV = decoder.logits(hidden_CE).float().cpu()
        logits_CV[:, mask_token_id] = float("-inf")
        rights.append(logits_CV.argmax(dim=-1) == targets_C)
        nats.append(torch.nn.functional.cross_entropy(logits_CV, targets_C, reduction="none").double())
    return torch.cat(rights), torch.cat(nats)


def _mark_unbroken(is_right_P: torch.Tensor, batch: TrainingBatch, offset_P: torch.Tensor) -> torch.Tensor:
    # Positions lie view by view, so a run goes on where both the index and the place in the block go on by one.
    unbroken_P = is_right_P.clone()
    for at in range(1, batch.num_diffusion):
        goes_on = batch.logit_idx_P[at] == batch.logit_idx_P[at - 1] + 1 and offset_P[at] > 0
        unbroken_P[at] &= bool(unbroken_P[at - 1]) or not goes_on
    return unbroken_P


def _block_offsets(batch: TrainingBatch, block_size: int, *, shift_logits: bool) -> tuple[torch.Tensor, torch.Tensor]:
    # Each target's place in its block, and whether it counts: all masked ones, of the clean stream's the anchors.
    places, idx_P = batch.layout.places, batch.logit_idx_P
    prompt_lens_P = torch.tensor(batch.layout.prompt_lens)[places.document_idx[idx_P]]
    offset_P = (places.position_idx[idx_P] + int(shift_logits) - prompt_lens_P) % block_size
    is_diffusion_P = torch.arange(len(idx_P)) < batch.num_diffusion
    return offset_P, is_diffusion_P | (offset_P == 0)
