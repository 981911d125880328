"""A run as its user meets it: it ends with a loadable model, goes on exactly, and refuses what is not its own."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ar2diff.clock import SystemClock
from ar2diff.data.stream import RowStream
from ar2diff.errors import CheckpointError, ConfigError, DataError, RunError, SpaceError, TrainingError
from ar2diff.hashing import sha256_file
from ar2diff.models.loading import load_model, save_model
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, find_events
from ar2diff.testing.models import END_ID, MASK_ID, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.checkpoint import checkpoint_dir, list_checkpoints
from ar2diff.train.config import TrainConfig
from ar2diff.train.metrics import SilentTrainProgress, read_metrics
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.optim import OptimConfig
from ar2diff.train.step_batches import build_step_batches
from ar2diff.train.trainer import train

CONFIG = TrainConfig(
    objective=ObjectiveConfig(block_sizes=(2, 4)),
    optim=OptimConfig(lr=3e-3),
    steps=20,
    micro=2,
    accum=2,
    row_len=64,
    save_every=10,
)


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
    with Ledger.open(out, clock=SystemClock(), run_id="r") as ledger:
        return out, run(places, out, ledger=ledger)


def test_a_run_learns_and_leaves_a_converted_model_that_loads(whole_run, places):
    out, result = whole_run
    metrics = read_metrics(out)
    assert [line["step"] for line in metrics] == list(range(1, 21))
    first, last = (
        sum(line["diffusion_loss"] + line["ar_loss"] for line in part) for part in (metrics[:5], metrics[-5:])
    )
    assert last < first - 0.5
    converted = load_model(result.checkpoint)
    assert converted.tensor_root == result.tensor_root
    assert converted.diffusion.trained_block_sizes == (2, 4)
    assert converted.diffusion.mask_token_id == MASK_ID
    assert (out / "loss.png").stat().st_size > 1000


def test_every_row_is_read_once_before_any_is_read_again(whole_run, places):
    num_rows = RowStream(places / "data", row_len=64, seed=0).num_rows
    row_ids = [row_id for line in read_metrics(whole_run[0]) for row_id in line["row_ids"]]
    assert len(row_ids) == 20 * 2 * 2
    for start in range(0, len(row_ids) - num_rows + 1, num_rows):
        assert sorted(row_ids[start : start + num_rows]) == list(range(num_rows))


def test_frozen_embeddings_stay_but_for_the_mask_row(whole_run, places):
    before, after = load_model(places / "base").decoder, load_model(whole_run[1].checkpoint).decoder
    same = (before.embedding.weight == after.embedding.weight).all(dim=1)
    assert same.tolist() == [idx != MASK_ID for idx in range(260)]
    assert not torch.equal(before.layers[0].mlp.up_proj.weight, after.layers[0].mlp.up_proj.weight)


def test_the_ledger_holds_start_saves_and_end_with_tensor_roots(whole_run, places):
    out, result = whole_run
    (started,) = find_events(out / LEDGER_NAME, "train_started")
    assert started.data["base_tensor_root"] == started.data["live_tensor_root"] == tiny_model(0).tensor_root
    assert started.data["missing"] == started.data["unexpected"] == []
    saves = find_events(out / LEDGER_NAME, "checkpoint_saved")
    assert [event.data["step"] for event in saves] == [10, 20]
    (finished,) = find_events(out / LEDGER_NAME, "train_finished")
    assert finished.data["tensor_root"] == saves[-1].data["tensor_root"] == result.tensor_root


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_trainer import CONFIG, run
from ar2diff.train.metrics import SilentTrainProgress
class Kill(SilentTrainProgress):
    def step_done(self, report):
        if report.step == 13:
            os.kill(os.getpid(), signal.SIGKILL)
run(Path({places!r}), Path({out!r}), progress=Kill())
"""


def test_killed_and_gone_on_equals_never_stopped_bit_for_bit(whole_run, places, tmp_path):
    paths = [*sys.path, str(Path(__file__).parent)]
    code = KILLED.format(paths=paths, places=str(places), out=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000010"]
    result = run(places, tmp_path, init=checkpoint_dir(tmp_path, 10))
    whole_out, whole = whole_run
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert sha256_file(result.checkpoint / name) == sha256_file(whole.checkpoint / name)
    keys = ("step", "lr", "diffusion_loss", "ar_loss", "grad_norm", "row_ids", "batch_sha256")
    resumed, straight = ([[line[key] for key in keys] for line in read_metrics(out)] for out in (tmp_path, whole_out))
    assert resumed == straight


def test_a_stopped_run_saves_and_says_so(places, tmp_path):
    answers = iter([False, False, True])
    result = run(places, tmp_path, stop_requested=lambda: next(answers))
    assert result.interrupted
    assert result.steps == 2
    assert list_checkpoints(tmp_path) == [result.checkpoint]


class _StepClock(SystemClock):
    """Every reading is one second later."""

    def __init__(self):
        self.now = 0.0

    def seconds(self):
        self.now += 1.0
        return self.now


def test_a_time_budget_ends_the_run_and_its_schedule_falls_over_it(places, tmp_path):
    config = replace(CONFIG, steps=None, minutes=0.25, save_every=None)
    result = train(config, places / "base", places / "data", tmp_path, clock=_StepClock())
    metrics = read_metrics(tmp_path)
    assert result.steps == 15
    assert result.elapsed_s <= 15
    assert metrics[-1]["lr"] == pytest.approx(CONFIG.optim.lr * CONFIG.optim.final_lr_share)
    assert max(line["lr"] for line in metrics) == CONFIG.optim.lr


def test_only_the_last_checkpoints_are_kept(places, tmp_path):
    run(places, tmp_path, replace(CONFIG, steps=5, save_every=1, keep_last=2))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004", "step-000005"]


def test_the_average_of_the_last_checkpoints_is_their_mean(places, tmp_path):
    run(places, tmp_path, replace(CONFIG, steps=3, save_every=1, average_last=3))
    mean = load_model(tmp_path / "averaged").decoder.state_dict()
    models = [load_model(path).decoder.state_dict() for path in list_checkpoints(tmp_path)]
    assert len(models) == 3
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, torch.stack([model[name] for model in models]).mean(dim=0))


def test_a_damaged_checkpoint_is_not_averaged(places, tmp_path):
    def damage(folder):
        if folder.name == "step-000002":
            content = bytearray((folder / "model.safetensors").read_bytes())
            content[-1] ^= 1
            (folder / "model.safetensors").write_bytes(content)

    progress = SilentTrainProgress()
    progress.checkpoint_saved = damage
    config = replace(CONFIG, steps=3, save_every=1, average_last=2)
    with (
        Ledger.open(tmp_path, clock=SystemClock(), run_id="r") as ledger,
        pytest.warns(RuntimeWarning, match="step-000002"),
    ):
        run(places, tmp_path, config, ledger=ledger, progress=progress)
    (averaged,) = find_events(tmp_path / LEDGER_NAME, "checkpoints_averaged")
    assert averaged.data["checkpoints"] == ["step-000001", "step-000003"]


def test_another_runs_folder_or_checkpoint_is_refused(whole_run, places, tmp_path):
    out, result = whole_run
    with pytest.raises(RunError, match="--init"):
        run(places, out)
    with pytest.raises(RunError, match="another run"):
        run(places, out, replace(CONFIG, seed=9))
    with pytest.raises(RunError, match="other settings"):
        run(places, tmp_path, replace(CONFIG, seed=9), init=result.checkpoint)
    save_model(tmp_path / "other", tiny_model(5), None)
    with pytest.raises(RunError, match="another base"):
        train(
            CONFIG,
            tmp_path / "other",
            places / "data",
            tmp_path / "new",
            clock=SystemClock(),
            init=result.checkpoint,
        )


@pytest.mark.parametrize("damage", ["marker", "flip", "missing", "state"])
def test_a_damaged_checkpoint_is_refused(places, tmp_path, damage):
    checkpoint = run(places, tmp_path, replace(CONFIG, steps=1)).checkpoint
    if damage == "marker":
        (checkpoint / "COMPLETE").unlink()
    elif damage == "flip":
        content = bytearray((checkpoint / "optimizer.safetensors").read_bytes())
        content[-1] ^= 1
        (checkpoint / "optimizer.safetensors").write_bytes(content)
    elif damage == "missing":
        (checkpoint / "model.safetensors").unlink()
    else:
        state = json.loads((checkpoint / "training.json").read_text())
        (checkpoint / "training.json").write_text(json.dumps({**state, "step": 0}))
    with pytest.raises(CheckpointError):
        run(places, tmp_path, replace(CONFIG, steps=1), init=checkpoint)


def test_a_loss_that_is_not_finite_stops_with_step_and_rows_and_keeps_the_last_checkpoint(places, tmp_path):
    config = replace(CONFIG, steps=4, save_every=1, optim=OptimConfig(lr=1e15, clip_norm=1e15, warmup_share=0.0))
    with (
        Ledger.open(tmp_path, clock=SystemClock(), run_id="r") as ledger,
        pytest.raises(TrainingError, match=r"step \d.*not finite.*rows \[.*diverged/step-") as stopped,
    ):
        run(places, tmp_path, config, ledger=ledger)
    assert list_checkpoints(tmp_path)
    (event,) = find_events(tmp_path / LEDGER_NAME, "train_diverged")
    assert event.data["step"] == int(re.search(r"at step (\d+)", str(stopped.value))[1])


def test_the_batch_of_a_loss_beyond_its_bound_is_kept_and_the_weights_are_not_changed(places, tmp_path):
    config = replace(CONFIG, steps=4, save_every=1, optim=OptimConfig(lr=30.0), max_loss=20.0)
    with pytest.raises(TrainingError, match="above 20 nats"):
        run(places, tmp_path, config)
    (kept,) = (tmp_path / "diverged").glob("*.safetensors")
    step = int(kept.stem.removeprefix("step-"))
    assert list_checkpoints(tmp_path)[-1].name == f"step-{step - 1:06d}"
    measured = json.loads(kept.with_suffix(".json").read_text())
    assert max(float(measured["diffusion"]), float(measured["ar"])) > 20.0
    stream = RowStream(places / "data", row_len=64, seed=0)
    settings = {"mask_token_id": MASK_ID, "end_token_id": END_ID}
    size = config.objective.block_size_at(step - 1, (step - 1) / 4)
    batches = build_step_batches(config, stream, step=step - 1, block_size=size, **settings)
    tensors = load_file(kept)
    for idx, batch in enumerate(batches):
        assert torch.equal(tensors[f"batch_{idx}.token_ids"], batch.token_ids_L)
        assert torch.equal(tensors[f"batch_{idx}.target_ids"], batch.target_ids_P)
    assert measured["row_ids"] == [list(batch.row_ids) for batch in batches]


def test_only_the_parameter_at_fault_is_named_where_a_gradient_is_not_finite(places, tmp_path, monkeypatch):
    from ar2diff.train import trainer

    def spoil(decoder, *arguments, **options):
        losses = accumulate_gradients(decoder, *arguments, **options)
        decoder.layers[1].mlp.up_proj.weight.grad[0, 0] = float("nan")
        return losses

    accumulate_gradients = trainer.accumulate_gradients
    monkeypatch.setattr(trainer, "accumulate_gradients", spoil)
    with pytest.raises(TrainingError, match=r"not finite in layers\.1\.mlp\.up_proj\.weight, rows"):
        run(places, tmp_path)


def test_a_run_goes_on_from_its_newest_whole_checkpoint_with_a_warning_and_a_ledger_event(
    whole_run, places, tmp_path
):
    answers = iter([False] * 12 + [True])
    run(places, tmp_path, stop_requested=lambda: next(answers))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000010", "step-000012"]
    damaged = checkpoint_dir(tmp_path, 12) / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with (
        Ledger.open(tmp_path, clock=SystemClock(), run_id="r") as ledger,
        pytest.warns(RuntimeWarning, match="step-000012"),
    ):
        result = run(places, tmp_path, init=tmp_path, ledger=ledger)
    (skipped,) = find_events(tmp_path / LEDGER_NAME, "checkpoint_skipped")
    assert skipped.data["checkpoint"] == "step-000012"
    (started,) = find_events(tmp_path / LEDGER_NAME, "train_started")
    assert (started.data["step"], started.data["resumed"]["checkpoint"]) == (10, "step-000010")
    assert result.tensor_root == whole_run[1].tensor_root


def test_a_folder_without_a_checkpoint_is_nothing_to_go_on_from(places, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        run(places, tmp_path, init=tmp_path)


def test_bf16_products_train_nearly_the_same(places, tmp_path, whole_run):
    run(places, tmp_path, replace(CONFIG, steps=20, precision="bf16"))
    wide, narrow = (read_metrics(out)[-1]["diffusion_loss"] for out in (whole_run[0], tmp_path))
    assert narrow == pytest.approx(wide, abs=0.15)


def test_a_run_stopped_before_its_first_step_goes_on_as_if_it_had_not_been(whole_run, places, tmp_path):
    stopped = run(places, tmp_path, stop_requested=lambda: True)
    assert (stopped.steps, stopped.interrupted) == (0, True)
    config = replace(CONFIG, steps=20)
    result = run(places, tmp_path, config, init=stopped.checkpoint)
    assert result.tensor_root == whole_run[1].tensor_root


@pytest.mark.parametrize(
    "changes",
    [
        {"minutes": float("inf"), "steps": None},
        {"minutes": float("nan"), "steps": None},
        {"steps": 10**30},
        {"micro": 10**12},
        {"seed": 10**30},
        {"row_len": 3},
    ],
)
def test_an_absurd_setting_is_refused_before_anything_is_read(changes):
    with pytest.raises(ConfigError):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": float("inf")},
        {"lr": float("nan")},
        {"weight_decay": float("nan")},
        {"weight_decay": -1.0},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"eps": -1.0},
        {"clip_norm": float("nan")},
    ],
)
def test_an_optimizer_setting_that_cannot_work_is_refused(changes):
    with pytest.raises(ConfigError):
        OptimConfig(**changes)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_loss_weight_is_a_finite_number(weight):
    with pytest.raises(ConfigError, match="ar_weight"):
        ObjectiveConfig(ar_weight=weight)


def test_data_that_changed_after_it_was_made_is_not_trained_on(places, tmp_path):
    data = write_tiny_shard(tmp_path / "data")
    content = bytearray((data / "token_ids.npy").read_bytes())
    content[-1] ^= 1
    (data / "token_ids.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"token_ids\.npy is not what the receipt says"):
        train(CONFIG, places / "base", data, tmp_path / "out", clock=SystemClock())
    assert not (tmp_path / "out").exists()


def test_data_of_another_tokenizer_is_not_trained_on(places, tmp_path):
    data = write_tiny_shard(tmp_path / "data")
    receipt = json.loads((data / "receipt.json").read_text()) | {"tokenizer": "0" * 64}
    (data / "receipt.json").write_text(json.dumps(receipt))
    (data / "COMPLETE").write_text(sha256_file(data / "receipt.json"))
    with pytest.raises(DataError, match="another tokenizer"):
        train(CONFIG, places / "base", data, tmp_path / "out", clock=SystemClock())


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), SpaceError("not enough free space")])
def test_a_full_disk_does_not_hide_that_the_training_diverged(places, tmp_path, monkeypatch, fault):
    def refuse(*_):
        raise fault

    monkeypatch.setattr("ar2diff.train.trainer.save_divergence", refuse)
    config = replace(CONFIG, steps=4, save_every=1, optim=OptimConfig(lr=30.0), max_loss=20.0)
    with (
        Ledger.open(tmp_path, clock=SystemClock(), run_id="r") as ledger,
        pytest.raises(TrainingError, match=r"above 20 nats.*could not be kept \(.*space"),
    ):
        run(places, tmp_path, config, ledger=ledger)
    (event,) = find_events(tmp_path / LEDGER_NAME, "train_diverged")
    assert event.data["batch"] is None
