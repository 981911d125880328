"""`ar2diff train` from the command line: defaults that chain, and wrong input that leaves nothing behind."""

import shutil

import pytest

from ar2diff.cli import run
from ar2diff.provenance.documents import verify_documents
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.checkpoint import list_checkpoints


@pytest.fixture
def here(tmp_path, tiny_parent, monkeypatch):
    """A working directory as `ar2diff fetch` and `ar2diff prepare` leave it."""
    shutil.copytree(tiny_parent, tmp_path / "base")
    write_tiny_shard(tmp_path / "data", num_documents=6)
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAIN = ["train", "--steps", "2", "--micro", "2", "--accum", "2", "--save-every", "1", "--out", "run"]


def test_fetch_prepare_and_train_chain_by_their_defaults(tiny_hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cache = ["--endpoint", tiny_hub.endpoint, "--cache", str(tmp_path / "cache")]
    assert run(["fetch", f"hub:tiny/parent@{tiny_hub.model}", *cache]) == 0
    few = ["--source", "procedural:structured?count=4", "--evaluation", "structured?count=2"]
    assert run(["prepare", *few, "--max-document-len", "480"]) == 0
    assert run(TRAIN) == 0
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000001", "step-000002"]
    assert verify_documents(tmp_path / "run") == []
    assert capsys.readouterr().out.strip().endswith("step-000002")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "-2"], "steps must be at least 1 (given: -2)"),
        (["--base", "absent"], "no model folder or .gguf file (given: absent)"),
        (["--preset", "fancy"], "unknown objective preset"),
        (["--device", "tpu"], "tpu"),
        (["--minutes", "3"], "either steps or minutes"),
    ],
)
def test_a_wrong_flag_is_one_line_and_makes_no_run(here, capsys, flags, said):
    words = TRAIN if flags[0] != "--steps" else [TRAIN[0], *TRAIN[3:]]
    assert run([*words, *flags]) == 2
    shown = capsys.readouterr()
    assert (shown.err.count("\n"), shown.out) == (1, "")
    assert said in shown.err
    assert not (here / "run").exists()


def test_a_full_disk_is_found_before_training_not_after_it(here, capsys, monkeypatch):
    usage = shutil.disk_usage(here)._replace(free=10)
    monkeypatch.setattr("ar2diff.files.shutil.disk_usage", lambda folder: usage)
    assert run(TRAIN) == 2
    assert "not enough free space" in capsys.readouterr().err
    left = sorted(path.name for path in (here / "run").iterdir())
    assert left == ["checkpoints.dsse.jsonl", "ledger.jsonl"]


def test_the_run_of_other_settings_and_a_corrupt_checkpoint_are_refused(here, capsys):
    assert run(TRAIN) == 0
    capsys.readouterr()
    assert run([*TRAIN, "--lr", "0.5"]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("error: the folder belongs to another run (given: run)")
    )
    newest = list_checkpoints(here / "run")[-1]
    (newest / "optimizer.safetensors").write_bytes(b"short")
    assert run([*TRAIN, "--init", str(newest)]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("error: optimizer.safetensors is missing or was changed")
    )
