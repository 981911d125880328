"""A training row computes what decoding computes, and its clean stream is the parent."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ar2diff.attention.masks import build_visible_mask
from ar2diff.attention.ops import causal_attend, masked_attend
from ar2diff.attention.tiled import tiled_attend
from ar2diff.data.stream import PackedRow
from ar2diff.diffusion.noise import NoiseConfig
from ar2diff.seeding import keyed_generator
from ar2diff.testing.models import END_ID, MASK_ID, tiny_model
from ar2diff.train.batch import BatchSettings, build_batch, keyed_noise
from ar2diff.train.step import accumulate_gradients, forward_nll

LENS = ((23, 7), (9, 1), (31, 12), (5, 5))
NOISE = NoiseConfig(anchor_mask_rate=0.3)


def make_row(lens=LENS, row_id=0):
    documents = [keyed_generator("row", row_id, idx).integers(97, 123, size) for idx, (size, _) in enumerate(lens)]
    for document in documents:
        document[-1] = END_ID
    starts = np.cumsum([0, *(size for size, _ in lens)])[:-1]
    token_ids = np.concatenate([*documents, np.full(6, END_ID)]).astype(np.int64)
    prompt_lens = np.array([prompt for _, prompt in lens])
    return PackedRow(
        row_id=row_id,
        token_ids=token_ids,
        document_starts=starts,
        document_lens=np.array([size for size, _ in lens]),
        prompt_lens=prompt_lens,
    )


def make_batch(
    rows, *, block_size=4, shift_logits=True, clean_attention="causal", noise=NOISE, step=0, anchor="predicted"
):
    settings = BatchSettings(
        block_size=block_size,
        shift_logits=shift_logits,
        clean_attention=clean_attention,
        mask_token_id=MASK_ID,
        end_token_id=END_ID,
        nelbo_weighted=False,
        with_causal=clean_attention == "causal",
        anchor=anchor,
    )
    return build_batch(rows, settings, keyed_noise(noise, shift_logits=shift_logits, seed=0, step=step))


def hidden_states(decoder, batch, attend):
    return decoder(batch.token_ids_L[None], batch.layout.places.position_idx[None], attend)[0]


@pytest.fixture(scope="module")
def decoder():
    return tiny_model(0).decoder


@pytest.mark.parametrize(
    ("clean_attention", "anchor"), [("causal", "predicted"), ("block", "predicted"), ("causal", "last")]
)
@pytest.mark.parametrize("block_size", [1, 4, 8])
@torch.no_grad()
def test_every_noisy_block_of_a_row_equals_decoding_that_block_behind_its_clean_prefix(
    decoder, clean_attention, anchor, block_size
):
    """The decoding side is [committed prefix | block], the prefix committed as the checkpoint's rule says."""
    shift = clean_attention == "causal"
    noise = NOISE if shift and anchor == "predicted" else NoiseConfig()
    batch = make_batch(
        [make_row()],
        block_size=block_size,
        shift_logits=shift,
        clean_attention=clean_attention,
        noise=noise,
        anchor=anchor,
    )
    scale = decoder.config.softmax_scale
    row_hidden = hidden_states(decoder, batch, tiled_attend(batch.layout, scale, tile_size=8))
    places = batch.layout.places
    checked = 0
    for span in batch.layout.spans:
        for start in range(span.noisy_start, span.end, block_size):
            block = slice(start, start + block_size)
            prefix_len = int(places.position_idx[start])
            ids = torch.cat((batch.token_ids_L[span.start : span.start + prefix_len], batch.token_ids_L[block]))
            alone = _decode_mask(prefix_len, block_size, places, span, clean_attention)
            hidden = decoder(ids[None], torch.arange(len(ids))[None], masked_attend(alone, scale))[0]
            torch.testing.assert_close(row_hidden[block], hidden[prefix_len:], atol=2e-5, rtol=1e-4)
            checked += 1
    expected = 0 if shift and block_size == 1 else 5
    assert checked >= expected


def _decode_mask(prefix_len, block_size, places, span, clean_attention):
    total = prefix_len + block_size
    mask = torch.ones(total, total, dtype=torch.bool).tril()
    if clean_attention == "block":
        block_idx = places.block_idx[span.start : span.start + prefix_len]
        mask[:prefix_len, :prefix_len] |= (block_idx[:, None] == block_idx[None]) & (block_idx[:, None] >= 0)
    mask[prefix_len:] = True
    return mask


@torch.no_grad()
def test_the_clean_stream_is_the_parents_causal_forward(decoder):
    batch = make_batch([make_row()])
    scale = decoder.config.softmax_scale
    row_hidden = hidden_states(decoder, batch, tiled_attend(batch.layout, scale))
    for span in batch.layout.spans:
        ids = batch.token_ids_L[span.start : span.noisy_start]
        parent = decoder(ids[None], torch.arange(len(ids))[None], causal_attend(scale))[0]
        torch.testing.assert_close(row_hidden[span.start : span.noisy_start], parent, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_no_noise_moves_one_bit_of_the_clean_stream(decoder):
    scale = decoder.config.softmax_scale
    batch = make_batch([make_row()])
    noisy = batch.layout.places.stream_idx > 0
    attend = tiled_attend(batch.layout, scale)
    before = hidden_states(decoder, batch, attend)
    batch.token_ids_L[noisy] = 101
    after = hidden_states(decoder, batch, attend)
    assert torch.equal(before[~noisy], after[~noisy])
    assert not torch.equal(before[noisy], after[noisy])


@pytest.mark.parametrize("position", [9, 15])
@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_block_and_an_in_block_token_does(decoder, position):
    row = make_row(((24, 6),))
    first = make_batch([row])
    changed_ids = row.token_ids.copy()
    changed_ids[position] = 65
    changed = PackedRow(
        row_id=0,
        token_ids=changed_ids,
        document_starts=row.document_starts,
        document_lens=row.document_lens,
        prompt_lens=row.prompt_lens,
    )
    second = make_batch([changed])
    attend = tiled_attend(first.layout, decoder.config.softmax_scale)
    moved = (hidden_states(decoder, first, attend) != hidden_states(decoder, second, attend)).any(dim=1)
    places = first.layout.places
    block = (position - 6) // 4
    assert not moved[places.block_idx < block].any()
    shown = (first.token_ids_L != second.token_ids_L) & (places.stream_idx > 0)
    for view in places.stream_idx[shown].unique():
        assert moved[(places.stream_idx == view) & (places.block_idx == block)].all()
    assert moved[(places.stream_idx > 0) & (places.block_idx > block)].all()


def test_the_sparse_path_equals_the_reference_mask_in_loss_and_gradients():
    loaded = tiny_model(1)
    batch = make_batch([make_row(), make_row(row_id=1)])
    mask = build_visible_mask(batch.layout.places, batch.layout.places, clean_attention="causal")
    results = []
    for attend in (None, masked_attend(mask, loaded.config.softmax_scale)):
        loaded.decoder.zero_grad()
        loss, _ = forward_nll(loaded.decoder, batch, batch.weights_P, mask_token_id=MASK_ID, attend=attend)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in loaded.decoder.parameters())])
    for sparse, reference in zip(*results, strict=True):
        torch.testing.assert_close(sparse, reference, atol=2e-4, rtol=1e-3)


def test_each_loss_position_predicts_the_token_that_decoding_would_reveal_there():
    for shift_logits in (True, False):
        batch = make_batch([make_row()], shift_logits=shift_logits, noise=NoiseConfig())
        places, count = batch.layout.places, batch.num_diffusion
        predicted = batch.logit_idx_P[:count] + (1 if shift_logits else 0)
        assert (batch.token_ids_L[predicted] == MASK_ID).all()
        assert (places.stream_idx[batch.logit_idx_P[:count]] == places.stream_idx[predicted]).all()
        for place, target in zip(predicted.tolist(), batch.target_ids_P[:count].tolist(), strict=True):
            span = next(s for s in batch.layout.spans if s.start <= place < s.end)
            assert batch.token_ids_L[span.start + places.position_idx[place]] == target
        assert (places.stream_idx[batch.logit_idx_P[count:]] == 0).all()
        assert torch.equal(batch.token_ids_L[batch.logit_idx_P[count:] + 1], batch.target_ids_P[count:])


def test_every_response_token_has_one_diffusion_loss_or_is_an_anchor_and_one_next_token_loss():
    batch = make_batch([make_row()])
    response_lens = [size - prompt for size, prompt in LENS if size > prompt]
    num_anchors = sum(-(-size // 4) for size in response_lens)
    assert batch.num_diffusion == sum(response_lens) - num_anchors
    assert batch.num_causal == sum(response_lens)


def test_blocks_that_begin_with_the_last_token_start_at_the_prompts_and_predict_the_first_of_the_response():
    batch = make_batch([make_row()], noise=NoiseConfig(all_mask_share=1.0), anchor="last")
    places, spans = batch.layout.places, batch.layout.spans
    prompt_lens = [prompt for size, prompt in LENS if size > prompt]
    for span, prompt_len in zip(spans, prompt_lens, strict=True):
        clean, noisy = (
            batch.token_ids_L[part]
            for part in (slice(span.start, span.noisy_start), slice(span.noisy_start, span.end))
        )
        starts = places.position_idx[span.noisy_start : span.end : 4]
        assert starts.tolist() == list(range(prompt_len - 1, len(clean) - 1, 4))
        assert torch.equal(noisy[::4], clean[starts])
        assert (noisy.view(-1, 4)[:, 1:] == MASK_ID).all()
        first = batch.logit_idx_P[: batch.num_diffusion].tolist().index(span.noisy_start)
        assert batch.target_ids_P[first] == clean[prompt_len]
    response_lens = [size - prompt for size, prompt in LENS if size > prompt]
    # Every fourth token from the last of the prompt on is given; that one is no token of the response.
    assert batch.num_diffusion == sum(size - size // 4 for size in response_lens)


def test_cutting_the_global_batch_otherwise_changes_no_gradient():
    rows = [make_row(((20 + idx, 3 + idx), (9, 2)), row_id=idx) for idx in range(4)]
    results = []
    for micro in (4, 2, 1):
        loaded = tiny_model(2)
        batches = [make_batch(rows[at : at + micro]) for at in range(0, 4, micro)]
        losses = accumulate_gradients(loaded.decoder, batches, ar_weight=0.5, mask_token_id=MASK_ID, precision="fp32")
        grads = [p.grad for p in loaded.decoder.parameters()]
        results.append([torch.tensor([losses.diffusion, losses.ar]), *grads])
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


class _LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_a_training_step_holds_no_tensor_of_length_squared_or_length_times_vocabulary():
    loaded = tiny_model(3, num_heads=2, num_kv_heads=1, vocab_size=6000)
    rows = [make_row(tuple((60, 12) for _ in range(40)), row_id=idx) for idx in range(2)]
    batch = make_batch(rows, block_size=4)
    length = len(batch.token_ids_L)
    loaded.decoder.embedding.weight.requires_grad_(False)
    with _LargestTensor() as largest:
        accumulate_gradients(loaded.decoder, [batch], ar_weight=0.5, mask_token_id=MASK_ID, precision="fp32")
    assert largest.numel < length * length / 8
    assert largest.numel < len(batch.logit_idx_P) * 6000 / 8
