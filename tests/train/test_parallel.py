"""A job of two ranks is the job of one: the same losses, the same kind of checkpoint, and a clear end."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from ar2diff.errors import ConfigError
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import load_model, save_model
from ar2diff.testing.models import llama_json, tiny_config, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.checkpoint import list_checkpoints, read_checkpoint
from ar2diff.train.metrics import read_metrics
from ar2diff.train.parallel import Ranks

FLAGS = ["--micro", "1", "--accum", "4", "--row-len", "64", "--block-size", "4", "--lr", "1e-3"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ar2diff"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_model(folder / "base", tiny_model(0), None)
    write_tiny_shard(folder / "data")
    return folder


def qwen3_model():
    config = tiny_config(model_type="qwen3", qk_norm="head", tied_head=False)
    hf_config = {**llama_json(tiny_config(tied_head=False)), "model_type": "qwen3"}
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return dataclasses.replace(tiny_model(0), decoder=decoder, config=config, hf_config=hf_config)


def command(places, out, *flags):
    return ["train", str(places / "base"), "--data", str(places / "data"), "--out", str(out), *FLAGS, *flags]


def run(line, **options):
    return subprocess.run(line, check=False, capture_output=True, text=True, timeout=170, env=os.environ, **options)


def test_two_ranks_train_what_one_process_trains(places, tmp_path):
    line = command(places, tmp_path / "two", "--steps", "20", "--save-every", "10")
    done = run([*LAUNCH, *line])
    assert done.returncode == 0, done.stderr[-3000:]
    from ar2diff.cli.train import train as train_command

    train_command(
        places / "base",
        data=places / "data",
        out=tmp_path / "one",
        steps=20,
        save_every=10,
        micro=1,
        accum=4,
        row_len=64,
        block_size=4,
        lr=1e-3,
    )
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert len(one) == len(two) == 20
    for ours, theirs in zip(one, two, strict=True):
        assert ours["batch_sha256"] == theirs["batch_sha256"]
        for name in ("diffusion_loss", "ar_loss", "grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-5, rel=1e-5), (ours["step"], name)
    models = [load_model(list_checkpoints(tmp_path / name)[-1]) for name in ("one", "two")]
    for name, tensor in models[0].decoder.state_dict().items():
        torch.testing.assert_close(models[1].decoder.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)
    # Its checkpoint is anyone's: one process goes on from it.
    again = command(places, tmp_path / "two", "--steps", "20", "--save-every", "10")
    middle = list_checkpoints(tmp_path / "two")[0]
    done = run([sys.executable, "-m", "ar2diff", *again, "--init", str(middle)])
    assert done.returncode == 0, done.stderr[-3000:]
    # And the other way round: two ranks go on from what one process saved.
    again = command(places, tmp_path / "one", "--steps", "20", "--save-every", "10")
    done = run([*LAUNCH, *again, "--init", str(list_checkpoints(tmp_path / "one")[0])])
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("one", "two"):
        for ours, theirs in zip(one, read_metrics(tmp_path / name), strict=True):
            assert theirs["diffusion_loss"] == pytest.approx(ours["diffusion_loss"], abs=1e-5, rel=1e-5)


def test_ranks_that_share_each_matrix_train_what_one_process_trains(tmp_path):
    # With head norms, of which each rank has its own heads' part of the gradient.
    save_model(tmp_path / "base", qwen3_model(), None)
    write_tiny_shard(tmp_path / "data")
    flags = ["--steps", "6", "--save-every", "3", "--distill-weight", "0.5"]
    line = [*LAUNCH, *command(tmp_path, tmp_path / "two", *flags, "--tensor-parallel", "2")]
    done = run(line)
    assert done.returncode == 0, done.stderr[-3000:]
    done = run([sys.executable, "-m", "ar2diff", *command(tmp_path, tmp_path / "one", *flags)])
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert len(one) == len(two) == 6
    for ours, theirs in zip(one, two, strict=True):
        for name in ("diffusion_loss", "ar_loss", "distill_loss", "grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-5, rel=1e-5), (ours["step"], name)
    done = run([*line, "--init", str(list_checkpoints(tmp_path / "two")[0])])
    assert done.returncode == 0, done.stderr[-3000:]
    for ours, theirs in zip(one, read_metrics(tmp_path / "two"), strict=True):
        assert theirs["diffusion_loss"] == pytest.approx(ours["diffusion_loss"], abs=1e-5, rel=1e-5)


def test_an_adapter_trained_by_two_ranks_is_the_one_that_one_process_trains(places, tmp_path):
    flags = ["--steps", "6", "--ar-weight", "0", "--distill-weight", "1", "--adapter-rank", "2"]
    done = run([*LAUNCH, *command(places, tmp_path / "two", *flags)])
    assert done.returncode == 0, done.stderr[-3000:]
    done = run([sys.executable, "-m", "ar2diff", *command(places, tmp_path / "one", *flags)])
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (load_model(list_checkpoints(tmp_path / name)[-1]).decoder for name in ("one", "two"))
    assert any(matrix.abs().sum() > 0 for name, matrix in one.adapter.parameters().items() if "lora_B" in name)
    for name, matrix in one.adapter.parameters().items():
        torch.testing.assert_close(two.adapter.parameters()[name], matrix, rtol=1e-3, atol=1e-5)
    base = load_model(places / "base").decoder.layers.state_dict()
    assert all(torch.equal(tensor, two.layers.state_dict()[name]) for name, tensor in base.items())


def test_a_killed_rank_ends_the_job_with_a_clear_error_and_leaves_the_last_checkpoint(places, tmp_path):
    line = [*LAUNCH, *command(places, tmp_path, "--steps", "100000", "--save-every", "1")]
    job = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 100
    while len(read_metrics(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], check=True, capture_output=True, text=True)
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    _, errors = job.communicate(timeout=100)
    assert job.returncode != 0
    assert "SIGKILL" in errors or "another rank" in errors
    state, _ = read_checkpoint(list_checkpoints(tmp_path)[-1])
    assert state.step >= 1


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("taken", "belongs to another run"),
        ("base", "no model folder or .gguf file"),
        ("accum", "accum"),
        ("tensor", "multiple of tensor"),
    ],
)
def test_what_is_refused_before_the_first_step_is_one_line_of_one_rank(places, tmp_path, what, said):
    line = command(places, tmp_path / "out", "--steps", "1")
    if what == "taken":
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "run.json").write_text("{}")
    if what == "base":
        line[1] = str(tmp_path / "nothing")
    if what == "accum":
        line[line.index("--accum") + 1] = "3"
    line += ["--tensor-parallel", "3"] if what == "tensor" else []
    done = run([*LAUNCH, *line])
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert said in errors[0]
    # The launcher's own account of the failed processes is in another form.
    assert "src/ar2diff" not in done.stderr
    assert not list_checkpoints(tmp_path / "out")


def test_a_model_that_cannot_be_cut_and_a_job_without_ranks_are_refused(places, tmp_path):
    ranks = Ranks()
    ranks.count, ranks.tensor_parallel = 4, 4
    for config, is_frozen in ((tiny_config(), False), (tiny_config(num_kv_heads=4), True)):
        with pytest.raises(ConfigError, match="tensor parallelism"):
            ranks.check_model(config, is_frozen=is_frozen)
    ranks.check_model(tiny_config(num_kv_heads=4), is_frozen=False)
    line = command(places, tmp_path, "--steps", "1", "--tensor-parallel", "2")
    done = run([sys.executable, "-m", "ar2diff", *line])
    assert done.returncode > 0
    assert "torchrun" in done.stderr
