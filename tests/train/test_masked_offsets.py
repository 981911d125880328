"""Masked accuracy by place in the block is what decoding's first pass over each block sees."""

import dataclasses

import numpy as np
import pytest
import torch

from ar2diff.attention.ops import masked_attend
from ar2diff.data.stream import PackedRow, RowStream
from ar2diff.diffusion.noise import NoiseConfig
from ar2diff.testing.models import END_ID, MASK_ID, always_model, tiny_diffusion, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.validation import measure_offsets

ALL_MASKED = NoiseConfig(num_views=1, complementary=False, all_mask_share=1.0)
SIZE = 4


def measure(decoder, rows, *, noise=ALL_MASKED, **settings):
    return measure_offsets(
        decoder, rows, tiny_diffusion(**settings), noise, end_token_id=END_ID, block_size=SIZE, seed=0
    )


def build_row(prompt, response):
    ids = np.array([*prompt, *response], dtype=np.int64)
    return PackedRow(
        row_id=0,
        token_ids=ids,
        document_starts=np.array([0]),
        document_lens=np.array([len(ids)]),
        prompt_lens=np.array([len(prompt)]),
    )


def test_blocks_that_begin_with_the_last_token_predict_the_first_of_the_response_under_masks():
    rows = [build_row([65, 66, 67], range(70, 79))]
    predicted, last = (
        measure(tiny_model(0).decoder, rows, anchor=anchor, trained_block_sizes=(SIZE,))
        for anchor in ("predicted", "last")
    )
    # Nine tokens: places 0 to 3, 0 to 3 and 0; or 1 to 3, 0 to 3, 0 and 1.
    assert predicted.num_tokens == (3, 2, 2, 2)
    assert last.num_tokens == (2, 3, 2, 2)


def documents_of(rows):
    for row in rows:
        for start, size, prompt in zip(row.document_starts, row.document_lens, row.prompt_lens, strict=True):
            yield torch.from_numpy(row.token_ids[start : start + size]), int(prompt)


def first_passes(rows, *, shift_logits):
    """By the book: one dense forward for each block, the text before it causal, the block seen whole."""
    loaded = tiny_model(0)
    sums = torch.zeros(3, SIZE, dtype=torch.float64)
    for ids, prompt_len in documents_of(rows):
        for start in range(prompt_len, len(ids), SIZE):
            block = torch.full((SIZE,), MASK_ID)
            if shift_logits:
                block[0] = ids[start]
            whole = torch.cat((ids[:start], block))
            mask = torch.ones(len(whole), len(whole), dtype=torch.bool).tril()
            mask[start:] = True
            with torch.no_grad():
                attend = masked_attend(mask, loaded.config.softmax_scale)
                logits = loaded.decoder.logits(loaded.decoder(whole[None], torch.arange(len(whole))[None], attend)[0])
            logits[:, MASK_ID] = -torch.inf
            for offset, target in enumerate(ids[start : start + SIZE]):
                at = start + offset - int(shift_logits)
                nats = torch.nn.functional.cross_entropy(logits[at].double(), target)
                sums[:, offset] += torch.stack((torch.tensor(1.0), (logits[at].argmax() == target).double(), nats))
    return sums.tolist()


@pytest.mark.parametrize("shift_logits", [True, False])
def test_all_masked_scores_are_those_of_the_first_pass_over_each_block(tmp_path, shift_logits):
    stream = RowStream(write_tiny_shard(tmp_path / "data"), row_len=64, seed=0)
    rows = [stream.row(idx) for idx in range(3)]
    measured = measure(tiny_model(0).decoder, rows, shift_logits=shift_logits)
    num_tokens, num_right, nats = first_passes(rows, shift_logits=shift_logits)
    assert list(measured.num_tokens) == num_tokens
    assert list(measured.num_right) == num_right
    assert measured.nats == pytest.approx(nats, rel=1e-5)


def test_a_draft_counts_as_unbroken_up_to_its_first_wrong_token():
    row = build_row([1, 2, 3], [65, 65, 7, 65, 65, 65, 65, 65, 65, 9])
    measured = measure(always_model(65).decoder, [row])
    assert measured.num_tokens == (3, 3, 2, 2)
    assert measured.num_right == (3, 2, 1, 2)
    assert measured.num_unbroken == (3, 2, 1, 1)


def test_without_a_shift_the_run_starts_at_the_first_place():
    row = build_row([1, 2, 3], [7, 65, 65, 65, 65, 65, 9, 65])
    measured = measure(always_model(65).decoder, [row], shift_logits=False)
    assert measured.num_right == (1, 2, 1, 2)
    assert measured.num_unbroken == (1, 1, 0, 0)


def test_random_masks_leave_tokens_out_and_depend_on_the_seed_alone():
    row = build_row([1, 2, 3], list(range(30, 62)))
    noise = dataclasses.replace(ALL_MASKED, all_mask_share=0.0)
    first, again = (measure(tiny_model(0).decoder, [row], noise=noise) for _ in range(2))
    assert first == again
    assert first.num_tokens[0] == 8
    assert 8 <= sum(first.num_tokens[1:]) < 24


def test_several_rows_are_added_up():
    rows = [build_row([1, 2], [65, 65, 7]), build_row([5], [65, 65, 65, 65, 65])]
    together = measure(always_model(65).decoder, rows)
    parts = [measure(always_model(65).decoder, [row]) for row in rows]
    for name in ("num_tokens", "num_right", "num_unbroken"):
        assert list(getattr(together, name)) == [sum(x) for x in zip(*(getattr(p, name) for p in parts), strict=True)]
