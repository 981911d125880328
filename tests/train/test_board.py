"""TensorBoard gets what metrics.jsonl holds, step by step, and nothing depends on it."""

import sys

import pytest

from ar2diff.clock import SystemClock
from ar2diff.errors import ConfigError
from ar2diff.models.loading import load_model, save_model
from ar2diff.testing.models import MASK_ID, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.board import BOARD_DIR, SCALARS, BoardProgress
from ar2diff.train.config import TrainConfig
from ar2diff.train.metrics import SilentTrainProgress, read_metrics
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.optim import OptimConfig
from ar2diff.train.trainer import train

CONFIG = TrainConfig(steps=4, micro=1, row_len=64, save_every=2, objective=ObjectiveConfig(block_sizes=(4,)))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_model(folder / "base", tiny_model(0), None)
    write_tiny_shard(folder / "data")
    return folder


def run(places, out, config=CONFIG, **options):
    return train(config, places / "base", places / "data", out, clock=SystemClock(), **options)


def read_board(folder):
    """Values by name and step, as a viewer reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / BOARD_DIR), purge_orphaned_data=True).Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


class Counting(SilentTrainProgress):
    """Remembers what it was told of."""

    def __init__(self):
        self.steps, self.saved = [], []

    def step_done(self, report):
        self.steps.append(report.step)

    def checkpoint_saved(self, folder):
        self.saved.append(folder.name)


def test_the_board_holds_the_values_of_the_step_log_and_passes_every_step_on(places, tmp_path):
    inner = Counting()
    with BoardProgress(tmp_path, inner) as progress:
        run(places, tmp_path, progress=progress)
    assert inner.steps == [1, 2, 3, 4]
    assert inner.saved == ["step-000002", "step-000004"]
    board, metrics = read_board(tmp_path), read_metrics(tmp_path)
    for name, field in SCALARS.items():
        expected = {line["step"]: pytest.approx(line[field], rel=1e-6) for line in metrics if line[field] is not None}
        assert board.get(name, {}) == expected
    assert set(SCALARS) - set(board) == {"loss/distillation"}


def test_a_continuation_takes_the_place_of_what_a_lost_one_has_drawn(places, tmp_path):
    whole = run(places, tmp_path)
    for first in (1, 3):
        with BoardProgress(tmp_path, SilentTrainProgress()) as progress:
            init = None if first == 1 else whole.checkpoint.with_name("step-000002")
            out = tmp_path / "board" if first == 1 else tmp_path
            run(places, out, progress=progress, init=init)
    assert sorted(read_board(tmp_path)["learning_rate"]) == [1, 2, 3, 4]


@pytest.mark.parametrize("frozen", [True, False])
def test_the_step_log_holds_learning_rate_gradient_and_mask_row_norm(places, tmp_path, frozen):
    result = run(places, tmp_path, TrainConfig(**{**vars_of(CONFIG), "optim": OptimConfig(freeze_embeddings=frozen)}))
    last = read_metrics(tmp_path)[-1]
    row = load_model(result.checkpoint).decoder.embedding.weight.detach()[MASK_ID]
    assert last["mask_row_norm"] == pytest.approx(float(row.norm()), rel=1e-6)
    assert last["lr"] > 0
    assert last["grad_norm"] > 0


def vars_of(config):
    return {name: getattr(config, name) for name in type(config).__dataclass_fields__}


def test_without_the_extra_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ConfigError, match="ar2diff\\[train\\]"):
        BoardProgress(tmp_path, SilentTrainProgress())
