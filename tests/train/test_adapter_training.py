"""Training a mask-gated adapter: the clean stream stays the parent, the noisy views learn, runs go on exactly."""

import dataclasses

import numpy as np
import pytest
import torch

from ar2diff.attention.masks import build_visible_mask
from ar2diff.attention.noisy import split_layout
from ar2diff.attention.ops import masked_attend
from ar2diff.clock import SystemClock
from ar2diff.data.stream import PackedRow
from ar2diff.diffusion.noise import NoiseConfig
from ar2diff.errors import ConfigError
from ar2diff.models.adapters import AdapterConfig, GatedAdapter
from ar2diff.models.loading import load_model, save_model
from ar2diff.testing.models import END_ID, MASK_ID, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.batch import BatchSettings, build_batch, keyed_noise
from ar2diff.train.checkpoint import checkpoint_dir
from ar2diff.train.config import TrainConfig
from ar2diff.train.forward import forward_clean, forward_states
from ar2diff.train.metrics import read_metrics
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.optim import OptimConfig
from ar2diff.train.step import accumulate_gradients
from ar2diff.train.trainer import train

NOISE = NoiseConfig()
ADAPTER = AdapterConfig(rank=4, alpha=8.0)
CONFIG = TrainConfig(
    objective=ObjectiveConfig(block_sizes=(4,), ar_weight=0.0, distill_weight=0.5, distill_top_k=8),
    optim=OptimConfig(lr=1e-2),
    steps=12,
    micro=2,
    row_len=64,
    save_every=6,
    adapter=ADAPTER,
)


def build_row(seed=0):
    generator = np.random.default_rng(seed)
    lens, prompts = np.array([17, 9, 30]), np.array([5, 2, 11])
    return PackedRow(
        row_id=seed,
        token_ids=generator.integers(97, 123, int(lens.sum())),
        document_starts=np.cumsum([0, *lens[:-1]]),
        document_lens=lens,
        prompt_lens=prompts,
    )


def batch_of(row, *, shift_logits=True, with_causal=False, noise=NOISE):
    settings = BatchSettings(
        block_size=4,
        shift_logits=shift_logits,
        clean_attention="causal",
        mask_token_id=MASK_ID,
        end_token_id=END_ID,
        nelbo_weighted=False,
        with_causal=with_causal,
    )
    return build_batch([row], settings, keyed_noise(noise, shift_logits=shift_logits, seed=0, step=0))


def adapted(seed=0):
    loaded = tiny_model(seed)
    loaded.decoder.requires_grad_(False)
    adapter = GatedAdapter(loaded.decoder, ADAPTER, mask_token_id=MASK_ID, seed=seed)
    for parameter in adapter.parameters().values():
        parameter.data.normal_(generator=torch.Generator().manual_seed(seed), std=0.3)
    return loaded, adapter


@pytest.mark.parametrize("seed", range(3))
def test_the_clean_stream_of_a_training_row_is_the_parents_bit_for_bit(seed):
    loaded, _ = adapted(seed)
    batch = batch_of(build_row(seed))
    split = split_layout(batch.layout)
    parent = forward_clean(tiny_model(seed).decoder, batch, split)
    states = forward_states(loaded.decoder, batch)
    assert torch.equal(states.clean_CE.view(torch.int32), parent.view(torch.int32))
    assert not states.clean_CE.requires_grad


@pytest.mark.parametrize("tile_size", [4, 128])
def test_stream_by_stream_equals_one_gated_pass_under_the_dense_mask(tile_size, monkeypatch):
    import ar2diff.train.forward as forward

    noisy = forward.noisy_attend
    monkeypatch.setattr(forward, "noisy_attend", lambda *a: noisy(*a, tile_size=tile_size))
    loaded, adapter = adapted()
    batch = batch_of(build_row(), with_causal=True)
    places = batch.layout.places
    dense = build_visible_mask(places, places, clean_attention="causal")
    with adapter.gated((places.stream_idx > 0)[None]):
        whole = loaded.decoder(
            batch.token_ids_L[None],
            places.position_idx[None],
            masked_attend(dense, loaded.config.softmax_scale),
        )
    expected = whole[0][batch.logit_idx_P]
    actual = forward_states(loaded.decoder, batch).at_positions_PE
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    parameters = list(adapter.parameters().values())
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    for got, want in zip(torch.autograd.grad((actual * weights).sum(), parameters), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_a_batch_in_which_no_token_is_masked_is_no_error():
    loaded, _ = adapted()
    noise = NoiseConfig(num_views=1, complementary=False, draw="bernoulli", t_min=1e-6, t_max=1e-6)
    batch = batch_of(build_row(), noise=noise)
    losses = accumulate_gradients(loaded.decoder, [batch], ar_weight=0.0, mask_token_id=MASK_ID, precision="fp32")
    assert losses.diffusion is None
    assert losses.num_loss_tokens == 0


def test_nothing_of_the_base_gets_a_gradient():
    loaded, adapter = adapted()
    accumulate_gradients(
        loaded.decoder, [batch_of(build_row())], ar_weight=0.0, mask_token_id=MASK_ID, precision="fp32"
    )
    assert all(parameter.grad is None for parameter in loaded.decoder.parameters())
    assert all(parameter.grad is not None for parameter in adapter.parameters().values())


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_model(folder / "base", tiny_model(0), None)
    write_tiny_shard(folder / "data")
    return folder


def run(places, out, config=CONFIG, **options):
    return train(config, places / "base", places / "data", out, clock=SystemClock(), **options)


@pytest.fixture(scope="module")
def whole_run(places, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, run(places, out)


def test_a_run_learns_and_leaves_a_model_whose_causal_path_is_the_parent(whole_run, places):
    out, result = whole_run
    metrics = read_metrics(out)
    sums = [line["diffusion_loss"] + line["distill_loss"] for line in metrics]
    assert sum(sums[-4:]) < sum(sums[:4]) - 0.5
    assert {line["ar_loss"] for line in metrics} == {None}
    converted, base = load_model(result.checkpoint), load_model(places / "base")
    assert converted.tensor_root == result.tensor_root
    assert converted.decoder.adapter.config == ADAPTER
    for name, tensor in base.decoder.state_dict().items():
        same = converted.decoder.state_dict()[name] == tensor
        if name == "embedding.weight":
            assert same.all(dim=1).tolist() == [idx != MASK_ID for idx in range(260)]
        else:
            assert same.all(), name
    ids = torch.arange(97, 117)[None]
    positions = torch.arange(20)[None]
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    attend = masked_attend(mask, base.config.softmax_scale)
    with torch.no_grad():
        ours, theirs = (m.decoder(ids, positions, attend) for m in (converted, base))
    assert torch.equal(ours, theirs)


def test_going_on_from_a_checkpoint_equals_no_interruption(whole_run, places, tmp_path):
    result = whole_run[1]
    run(places, tmp_path / "again", stop_requested=iter([False] * 6 + [True]).__next__)
    again = run(places, tmp_path / "again", init=checkpoint_dir(tmp_path / "again", 6))
    assert again.tensor_root == result.tensor_root


@pytest.mark.parametrize(
    "objective",
    [ObjectiveConfig(), ObjectiveConfig(clean_attention="block", ar_weight=0.0)],
)
def test_an_objective_that_would_train_the_frozen_stream_is_refused(objective):
    with pytest.raises(ConfigError):
        dataclasses.replace(CONFIG, objective=objective)


def test_an_adapter_is_never_trained_as_something_else(whole_run, places, tmp_path):
    base = whole_run[1].checkpoint
    for adapter in (None, AdapterConfig(rank=2)):
        with pytest.raises(ConfigError, match="adapter"):
            train(
                dataclasses.replace(CONFIG, adapter=adapter),
                base,
                places / "data",
                tmp_path / str(adapter),
                clock=SystemClock(),
            )


def test_the_average_of_the_last_checkpoints_averages_the_adapter(places, tmp_path):
    run(places, tmp_path, dataclasses.replace(CONFIG, steps=3, save_every=1, average_last=2))
    second, third = (load_model(checkpoint_dir(tmp_path, step)).decoder.adapter.parameters() for step in (2, 3))
    for name, mean in load_model(tmp_path / "averaged").decoder.adapter.parameters().items():
        assert not torch.equal(second[name], third[name])
        torch.testing.assert_close(mean, (second[name] + third[name]) / 2)


def test_a_run_goes_on_from_before_its_first_masked_token(places, tmp_path):
    # Blocks of one token mask nothing under shifted logits: the adapter has no moments until they grow.
    growing = dataclasses.replace(CONFIG.objective, block_sizes=(1, 4))
    config = dataclasses.replace(CONFIG, objective=growing, save_every=2)
    whole = run(places, tmp_path / "whole", config)
    run(places, tmp_path / "cut", config, stop_requested=iter([False, False, True]).__next__)
    resumed = run(places, tmp_path / "cut", config, init=checkpoint_dir(tmp_path / "cut", 2))
    assert resumed.tensor_root == whole.tensor_root
