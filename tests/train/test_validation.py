"""Likelihood reports: exact at block size 1, a bound beyond."""

import math

import numpy as np
import pytest
import torch

from ar2diff.data.stream import PackedRow, RowStream
from ar2diff.testing.models import END_ID, tiny_diffusion, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.validation import measure_likelihood


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    stream = RowStream(write_tiny_shard(tmp_path_factory.mktemp("v") / "data"), row_len=64, seed=0)
    return [stream.row(idx) for idx in range(4)]


def measure(rows, *, block_size, num_draws=1, **settings):
    diffusion = tiny_diffusion(**settings)
    return measure_likelihood(
        tiny_model(0).decoder,
        rows,
        diffusion,
        end_token_id=END_ID,
        block_size=block_size,
        num_draws=num_draws,
        seed=0,
    )


def test_at_block_size_one_the_bound_is_the_causal_likelihood_itself(rows):
    result = measure(rows, block_size=1)
    assert result.bound_bits == pytest.approx(result.ar_bits, rel=1e-6)


def test_the_causal_bits_are_those_of_a_plain_forward(rows):
    from ar2diff.attention.ops import causal_attend

    loaded = tiny_model(0)
    nats, count = 0.0, 0
    for row in rows:
        for start, size, prompt in zip(row.document_starts, row.document_lens, row.prompt_lens, strict=True):
            ids = torch.from_numpy(row.token_ids[start : start + size])
            with torch.no_grad():
                hidden = loaded.decoder(
                    ids[None], torch.arange(size)[None], causal_attend(loaded.config.softmax_scale)
                )
                logits = loaded.decoder.logits(hidden[0]).double()
            logits[:, tiny_diffusion().mask_token_id] = -torch.inf
            losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
            nats += float(losses[prompt - 1 :].sum())
            count += int(size - prompt)
    result = measure(rows, block_size=4)
    assert result.ar_bits == pytest.approx(nats / count / math.log(2.0), rel=1e-4)
    assert result.num_tokens == count


@pytest.mark.parametrize("shift_logits", [True, False])
def test_more_draws_change_the_bound_little_and_a_random_model_has_a_loose_one(rows, shift_logits):
    clean = "causal" if shift_logits else "block"
    few = measure(rows, block_size=4, num_draws=8, shift_logits=shift_logits, clean_attention=clean)
    many = measure(rows, block_size=4, num_draws=24, shift_logits=shift_logits, clean_attention=clean)
    assert few.bound_bits == pytest.approx(many.bound_bits, rel=0.1)
    assert many.bound_bits > 0


def test_a_document_without_a_prompt_is_divided_by_the_tokens_that_are_scored():
    # A model of equal logits pays log2(259) bits for every token, whatever is scored: the mask has no probability.
    loaded = tiny_model(0)
    loaded.decoder.final_norm.weight.data.zero_()
    row = PackedRow(
        row_id=0,
        token_ids=np.full(6, 70, dtype=np.int64),
        document_starts=np.array([0]),
        document_lens=np.array([6]),
        prompt_lens=np.array([0]),
    )
    for shift_logits in (True, False):
        diffusion = tiny_diffusion(shift_logits=shift_logits)
        options = {"end_token_id": END_ID, "block_size": 3, "num_draws": 4, "seed": 0}
        result = measure_likelihood(loaded.decoder, [row], diffusion, **options)
        assert result.num_tokens == 5
        assert result.ar_bits == pytest.approx(math.log2(259), rel=1e-5)
        assert result.bound_bits == pytest.approx(math.log2(259), rel=1e-5)


def test_where_blocks_begin_with_the_last_token_the_same_tokens_count_and_the_bound_is_another(rows):
    predicted, last = (
        measure(rows, block_size=4, anchor=anchor, trained_block_sizes=(4,)) for anchor in ("predicted", "last")
    )
    assert (last.num_tokens, last.ar_bits) == (predicted.num_tokens, pytest.approx(predicted.ar_bits))
    assert last.bound_bits != pytest.approx(predicted.bound_bits, rel=1e-3)
