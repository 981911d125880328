"""`ar2diff train` from flags to files."""

import os
import signal
from pathlib import Path

import pytest

from ar2diff.cli.train import train
from ar2diff.errors import ConfigError
from ar2diff.models.loading import load_model, save_model
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.testing.models import tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.checkpoint import list_checkpoints
from ar2diff.train.metrics import read_metrics


@pytest.fixture
def inputs(tmp_path):
    save_model(tmp_path / "base", tiny_model(0), None)
    return {"base": tmp_path / "base", "data": write_tiny_shard(tmp_path / "data"), "out": tmp_path / "out"}


def test_the_flags_of_the_reference_run_mean_what_they_mean_there(inputs, capsys):
    assert train(**inputs, steps=4, micro=2, accum=2, save_every=2, block_size=4, row_len=64) == 0
    checkpoint = Path(capsys.readouterr().out.strip())
    assert [path.name for path in list_checkpoints(inputs["out"])] == ["step-000002", "step-000004"]
    assert checkpoint.name == "step-000004"
    assert load_model(checkpoint).diffusion.block_size == 4
    assert all(len(line["row_ids"]) == 4 for line in read_metrics(inputs["out"]))
    again = {**inputs, "steps": 4, "micro": 2, "accum": 2, "save_every": 2, "block_size": 4, "row_len": 64}
    assert train(**again, init=list_checkpoints(inputs["out"])[0]) == 0
    starts = find_events(inputs["out"] / LEDGER_NAME, "train_started")
    assert [event.data["step"] for event in starts] == [0, 2]


def test_an_adapter_is_trained_by_a_flag(inputs, capsys):
    flags = {"steps": 2, "micro": 2, "row_len": 64, "ar_weight": 0.0, "distill_weight": 1.0}
    assert train(**inputs, **flags, adapter_rank=2) == 0
    adapter = load_model(Path(capsys.readouterr().out.strip())).decoder.adapter
    assert (adapter.config.rank, adapter.config.alpha) == (2, 4.0)


@pytest.mark.parametrize(
    "flags",
    [
        {"steps": -1},
        {"steps": 1, "micro": 0},
        {},
        {"steps": 1, "minutes": 1.0},
        {"steps": 1, "adapter_alpha": 2.0},
        {"steps": 1, "adapter_rank": 2},
    ],
)
def test_impossible_flags_are_one_line_errors_and_write_nothing(inputs, flags):
    with pytest.raises(ConfigError):
        train(**inputs, **flags)
    assert not inputs["out"].exists()


def test_ctrl_c_saves_after_the_step_and_says_how_to_go_on(inputs, capsys, monkeypatch):
    from ar2diff.cli.train_bar import TrainBar

    monkeypatch.setattr(TrainBar, "step_done", lambda self, report: os.kill(os.getpid(), signal.SIGINT))
    assert train(**inputs, steps=50, micro=2, row_len=64) == 130
    (checkpoint,) = list_checkpoints(inputs["out"])
    assert checkpoint.name == "step-000001"
    assert f"--init {checkpoint}" in capsys.readouterr().out
