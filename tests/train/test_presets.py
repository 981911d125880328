"""The loss and the gradient of every preset equal a computation by hand: block by block, view by view, all dense."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ar2diff.attention.ops import masked_attend
from ar2diff.data.stream import PackedRow
from ar2diff.diffusion.corrupt import cut_response
from ar2diff.diffusion.noise import NoiseConfig, draw_block_noise
from ar2diff.errors import DataError
from ar2diff.testing.models import END_ID, MASK_ID, tiny_model
from ar2diff.train.batch import BatchSettings, build_batch, keyed_noise
from ar2diff.train.config import TrainConfig
from ar2diff.train.objective import PRESETS
from ar2diff.train.setup import build_distillation
from ar2diff.train.step import accumulate_gradients

LENS, PROMPTS = (21, 13), (6, 0)
NAMES = sorted(PRESETS)


def build_row():
    token_ids = np.random.default_rng(0).integers(97, 123, sum(LENS))
    return PackedRow(
        row_id=3,
        token_ids=token_ids,
        document_starts=np.array([0, LENS[0]]),
        document_lens=np.array(LENS),
        prompt_lens=np.array(PROMPTS),
    )


def log_probs(loaded, ids, positions, mask):
    hidden = loaded.decoder(ids[None], positions[None], masked_attend(mask, loaded.config.softmax_scale))
    logits = loaded.decoder.logits(hidden[0])
    return F.log_softmax(logits.index_fill(1, torch.tensor([MASK_ID]), -torch.inf), dim=-1)


def context_mask(length, prompt_len, size, clean_attention):
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if clean_attention == "block":
        for start in range(prompt_len, length, size):
            mask[start : start + size, start : start + size] = True
    return mask


def hand_losses(loaded, parent, objective, size):
    """Weighted sums over the row: (diffusion, its scale), (next token, its count), (divergence, its count)."""
    row = build_row()
    documents = [
        (row.token_ids[start : start + length], prompt)
        for start, length, prompt in zip(row.document_starts, LENS, PROMPTS, strict=True)
    ]
    shifted = objective.shift_logits
    cut = [cut_response(i, p, block_size=size, end_token_id=END_ID, shift_logits=shifted) for i, p in documents]
    supervised = np.concatenate([blocks.supervised_NS for blocks in cut])
    noise = draw_block_noise(objective.noise, supervised, shift_logits=shifted, seed=6, step=2, row_id=3)
    diffusion, causal, divergence = [], [], []
    first_block = 0
    for (plain_ids, prompt), blocks in zip(documents, cut, strict=True):
        ids = torch.from_numpy(plain_ids)
        every = torch.arange(len(ids))
        causal_mask = context_mask(len(ids), prompt, size, "causal")
        teacher = log_probs(parent, ids, every, causal_mask).detach()
        student = log_probs(loaded, ids, every, causal_mask)
        causal += [-student[at - 1, ids[at]] for at in range(max(prompt, 1), len(ids))]
        for block in range(len(blocks.token_ids_NS)):
            start = prompt + block * size
            for view in range(noise.masked_NKS.shape[1]):
                masked = noise.masked_NKS[first_block + block, view]
                truth = torch.from_numpy(blocks.token_ids_NS[block])
                own = torch.where(torch.from_numpy(masked), MASK_ID, truth)
                mask = torch.ones(start + size, start + size, dtype=torch.bool)
                mask[:start] = False
                mask[:start, :start] = context_mask(start, prompt, size, objective.clean_attention)
                out = log_probs(loaded, torch.cat((ids[:start], own)), torch.arange(start + size), mask)
                for offset in range(1 if shifted else 0, size):
                    target = start + offset
                    if target >= len(ids) or not masked[offset]:
                        continue
                    predicted = out[target - 1 if shifted else target]
                    weight = noise.weight_NK[first_block + block, view] if objective.nelbo_weighted else 1.0
                    diffusion.append(-predicted[ids[target]] * weight)
                    if target:
                        known = teacher[target - 1] > -torch.inf
                        gap = teacher[target - 1][known] - predicted[known]
                        divergence.append((teacher[target - 1][known].exp() * gap).sum())
        first_block += len(blocks.token_ids_NS)
    scale = supervised.sum() if objective.nelbo_weighted else len(diffusion)
    return sum(diffusion) / scale, sum(causal) / len(causal), sum(divergence), len(divergence), len(diffusion)


def step(loaded, objective, size):
    config = TrainConfig(objective=objective, steps=1)
    settings = BatchSettings(
        block_size=size,
        shift_logits=objective.shift_logits,
        clean_attention=objective.clean_attention,
        mask_token_id=MASK_ID,
        end_token_id=END_ID,
        nelbo_weighted=objective.nelbo_weighted,
        with_causal=objective.ar_weight > 0,
    )
    draw = keyed_noise(objective.noise, shift_logits=objective.shift_logits, seed=6, step=2)
    distillation = build_distillation(config, loaded.decoder)
    # The student has moved on from its parent.
    for parameter in loaded.decoder.layers.parameters():
        parameter.data.mul_(1.1)
    return accumulate_gradients(
        loaded.decoder,
        [build_batch([build_row()], settings, draw)],
        ar_weight=objective.ar_weight,
        mask_token_id=MASK_ID,
        precision="fp32",
        diffusion_weight=objective.diffusion_weight,
        distillation=distillation,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_a_preset_is_what_its_formula_says(name):
    objective = PRESETS[name]
    size = objective.block_sizes[-1]
    parent, loaded = tiny_model(0), tiny_model(0)
    losses = step(loaded, objective, size)
    by_hand = copy.deepcopy(loaded)
    by_hand.decoder.zero_grad()
    diffusion, causal, divergence, num_taught, num_masked = hand_losses(by_hand, parent, objective, size)
    assert num_masked > 3
    assert losses.diffusion == pytest.approx(diffusion.item(), rel=1e-4)
    total = objective.diffusion_weight * diffusion
    if objective.ar_weight:
        assert losses.ar == pytest.approx(causal.item(), rel=1e-4)
        total = total + objective.ar_weight * causal
    if objective.distill_weight:
        assert losses.distill == pytest.approx(divergence.item() / num_taught, rel=1e-4)
        total = total + objective.distill_weight * divergence / num_masked
    total.backward()
    wanted = dict(by_hand.decoder.layers.named_parameters())
    for part, parameter in loaded.decoder.layers.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[part].grad, rtol=2e-3, atol=2e-5, msg=part)


def test_rows_without_a_response_are_refused_in_words():
    row = PackedRow(
        row_id=7,
        token_ids=np.arange(97, 102),
        document_starts=np.array([0]),
        document_lens=np.array([5]),
        prompt_lens=np.array([5]),
    )
    settings = BatchSettings(
        block_size=4,
        shift_logits=True,
        clean_attention="causal",
        mask_token_id=MASK_ID,
        end_token_id=END_ID,
        nelbo_weighted=False,
        with_causal=True,
    )
    with pytest.raises(DataError, match="7"):
        build_batch([row], settings, keyed_noise(NoiseConfig(), shift_logits=True, seed=0, step=0))
