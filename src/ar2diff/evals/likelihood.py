"""Bits per token of reference answers: exact on the causal stream, the bound under block diffusion."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ar2diff.data.stream import PackedRow
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.loading import LoadedModel
from ar2diff.models.mask_token import grow_vocabulary
from ar2diff.tasks.problem import Problem
from ar2diff.tokenizer import Tokenizer
from ar2diff.train.validation import Likelihood, measure_likelihood


def measure_bits(
    model: LoadedModel, diffusion: DiffusionConfig, problems: Sequence[Problem], *, seed: int, num_draws: int = 2
) -> Likelihood:
    """Bits per token of the problems' reference answers under `model`, the end of turn counted.

    Args:
        diffusion: block size, shift, attention and mask to measure with.
        num_draws: mask draws per block for the bound.
    """
    return measure_likelihood(
        model.decoder,
        [build_row(problem, model.tokenizer, row_id=idx) for idx, problem in enumerate(problems)],
        diffusion,
        end_token_id=model.tokenizer.eos_token_ids[0],
        block_size=diffusion.block_size,
        num_draws=num_draws,
        seed=seed,
    )


def measure_parent_bits(parent: LoadedModel, diffusion: DiffusionConfig, problems: Sequence[Problem]) -> float:
    """Bits per token of the reference answers under an AR parent, over the words that its child can say.

    Args:
        parent: grows by the mask's row where it has none; that row is never predicted.
        diffusion: of the child, which names the mask.
    """
    config = parent.decoder.config
    if diffusion.mask_token_id >= config.vocab_size:
        grow_vocabulary(parent.decoder, dataclasses.replace(config, vocab_size=diffusion.mask_token_id + 1))
    causal = dataclasses.replace(diffusion, shift_logits=True, clean_attention="causal")
    return measure_bits(parent, causal, problems, seed=0, num_draws=1).ar_bits


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
