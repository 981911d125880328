"""The learning rate over a run, what is trained, and a mask row that trains alone."""

import itertools

import pytest
import torch

from ar2diff.attention.ops import causal_attend
from ar2diff.errors import ConfigError
from ar2diff.testing.models import MASK_ID, tiny_model
from ar2diff.train.config import TrainConfig
from ar2diff.train.mask_row import MaskRow
from ar2diff.train.optim import MASK_ROW_NAME, OptimConfig, learning_rate, trained_parameters


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_the_rate_rises_to_its_peak_and_falls_to_its_end_without_a_jump(schedule):
    config = OptimConfig(schedule=schedule, lr=1.0, warmup_share=0.1)
    rates = [learning_rate(config, progress / 1000) for progress in range(1001)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.03)
    assert rates[-1] == pytest.approx(config.final_lr_share)
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < 0.011
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def _sum_of_states(loaded, ids):
    hidden = loaded.decoder(ids, torch.arange(ids.shape[1])[None], causal_attend(loaded.config.softmax_scale))
    return hidden.square().sum() + hidden.sum()


def test_a_mask_row_of_its_own_gets_the_gradient_that_a_trained_embedding_would_give_it():
    ids = torch.tensor([[1, MASK_ID, 7, MASK_ID, 2]])
    whole = tiny_model(0)
    _sum_of_states(whole, ids).backward()
    frozen = tiny_model(0)
    row = MaskRow(frozen.decoder, MASK_ID)
    named = trained_parameters(frozen.decoder, row)
    _sum_of_states(frozen, ids).backward()
    torch.testing.assert_close(row.row.grad, whole.decoder.embedding.weight.grad[MASK_ID])
    assert frozen.decoder.embedding.weight.grad is None
    assert MASK_ROW_NAME in named
    assert "embedding.weight" not in named


def test_a_removed_mask_row_leaves_its_values_in_the_embedding():
    loaded = tiny_model(0)
    row = MaskRow(loaded.decoder, MASK_ID)
    row.row.data.fill_(3.0)
    ids = torch.tensor([[1, MASK_ID]])
    before = _sum_of_states(loaded, ids)
    row.remove()
    assert torch.equal(_sum_of_states(loaded, ids), before)
    assert (loaded.decoder.embedding.weight[MASK_ID] == 3.0).all()


def test_trained_embeddings_are_trained_where_asked():
    named = trained_parameters(tiny_model(0, tied_head=False).decoder, None)
    assert {"embedding.weight", "head.weight"} <= set(named)


@pytest.mark.parametrize(
    "setting",
    [{"steps": 0}, {"steps": None}, {"minutes": 1.0}, {"micro": -1}, {"save_every": 0}, {"precision": "fp16"}],
)
def test_an_impossible_run_is_refused(setting):
    with pytest.raises(ConfigError):
        TrainConfig(**{"steps": 1, **setting})


@pytest.mark.parametrize("setting", [{"lr": 0.0}, {"schedule": "x"}, {"warmup_share": 2.0}, {"clip_norm": 0.0}])
def test_an_impossible_optimizer_is_refused(setting):
    with pytest.raises(ConfigError):
        OptimConfig(**setting)
