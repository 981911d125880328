"""Bits per token of reference answers: exact on the causal stream, the bound under block diffusion.

Shape letters: P loss positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ar2diff.data.stream import PackedRow
from ar2diff.diffusion.likelihood import bits_per_token, draw_bound_noise
from ar2diff.diffusion.noise import BlockNoise, Bools
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.loading import LoadedModel
from ar2diff.seeding import keyed_generator
from ar2diff.tasks.problem import Problem
from ar2diff.tokenizer import Tokenizer
from ar2diff.train.batch import BatchSettings, TrainingBatch, build_batch
from ar2diff.train.step import forward_nll


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """Bits per answer token, the end of turn counted: `causal` exact, `diffusion` an estimate of the bound."""

    causal: float
    diffusion: float


def measure_bits(
    model: LoadedModel, diffusion: DiffusionConfig, problems: Sequence[Problem], *, seed: int, num_draws: int = 2
) -> Bits:
    """Bits per token of the problems' reference answers under `model`.

    Args:
        diffusion: block size, shift and mask to measure with; an AR parent is measured with its child's.
        num_draws: mask draws per block for the bound.
    """
    causal, bound, num_tokens = 0.0, 0.0, 0
    for idx, problem in enumerate(problems):
        row = build_row(problem, model.tokenizer, row_id=idx)
        for draw in range(num_draws):
            batch = _build_batch(row, diffusion, model.tokenizer, seed=seed, draw=draw)
            nll_P = _forward(model, diffusion, batch)
            causal_P = nll_P[batch.num_diffusion :]
            weighted = (nll_P * batch.weights_P)[: batch.num_diffusion].sum().item()
            anchors = causal_P[:: diffusion.block_size].sum().item() if diffusion.shift_logits else 0.0
            causal += causal_P.sum().item() / num_draws
            bound += (weighted + anchors) / num_draws
        num_tokens += int(row.document_lens[0] - row.prompt_lens[0])
    return Bits(causal=bits_per_token(causal, num_tokens), diffusion=bits_per_token(bound, num_tokens))


def build_row(problem: Problem, tokenizer: Tokenizer, *, row_id: int) -> PackedRow:
    """One problem and its reference answer as a row of one document."""
    prompt = tokenizer.encode_chat(list(problem.messages), add_generation_prompt=True)
    answer = [*tokenizer.encode(problem.reference), tokenizer.eos_token_ids[0]]
    return PackedRow(
        row_id=row_id,
        token_ids=np.array(prompt + answer, dtype=np.int64),
        document_starts=np.array([0], dtype=np.int64),
        document_lens=np.array([len(prompt) + len(answer)], dtype=np.int64),
        prompt_lens=np.array([len(prompt)], dtype=np.int64),
    )


def _build_batch(
    row: PackedRow, diffusion: DiffusionConfig, tokenizer: Tokenizer, *, seed: int, draw: int
) -> TrainingBatch:
    def draw_noise(supervised_NS: Bools, row_id: int) -> BlockNoise:
        generator = keyed_generator("bound", seed, row_id, draw)
        return draw_bound_noise(supervised_NS, shift_logits=diffusion.shift_logits, generator=generator)

    settings = BatchSettings(
        block_size=diffusion.block_size,
        shift_logits=diffusion.shift_logits,
        clean_attention=diffusion.clean_attention,
        mask_token_id=diffusion.mask_token_id,
        end_token_id=tokenizer.eos_token_ids[0],
        nelbo_weighted=True,
        with_causal=True,
    )
    return build_batch([row], settings, draw_noise)


def _forward(model: LoadedModel, diffusion: DiffusionConfig, batch: TrainingBatch) -> Tensor:
    with torch.no_grad():
        _, nll_P = forward_nll(model.decoder, batch, batch.weights_P, mask_token_id=diffusion.mask_token_id)
    return nll_P.float().cpu()
