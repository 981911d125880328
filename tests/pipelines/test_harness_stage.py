"""lm-eval's tasks on one model: figures and samples in the run, digests in the ledger, wrong inputs in one line."""

import json

import pytest

from ar2diff.cli import run as run_command
from ar2diff.errors import ConfigError
from ar2diff.hashing import sha256_file
from ar2diff.models.loading import save_model
from ar2diff.pipelines import harness
from ar2diff.pipelines.harness import HarnessConfig
from ar2diff.provenance.documents import verify_documents
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.testing.harness_tasks import write_tasks
from ar2diff.testing.models import tiny_diffusion, tiny_model


@pytest.fixture
def words(tmp_path):
    save_model(tmp_path / "model", tiny_model(2, max_seq_len=512), tiny_diffusion())
    folder = write_tasks(tmp_path / "tasks")
    line = ["harness", str(tmp_path / "model"), "--out", str(tmp_path / "run"), "--include", folder]
    return [*line, "--precision", "fp32"]


def test_figures_samples_and_digests_are_kept(words, tmp_path, capsys):
    asked = ["--tasks", "local_gen", "--tasks", "local_choice", "--mode", "diffusion", "--steps", "2", "--limit", "3"]
    assert run_command([*words, *asked]) == 0
    shown = capsys.readouterr().out
    run = tmp_path / "run"
    report = json.loads((run / "harness.json").read_text())
    assert report["about"]["mode"] == "diffusion, steps=2"
    assert set(report["tasks"]) == {"local_gen", "local_choice"}
    choice = report["tasks"]["local_choice"]
    assert (choice["num_samples"], set(choice["results"])) == (3, {"acc,none", "acc_norm,none"})
    assert f"local_choice  acc  {choice['results']['acc,none']}  (3 samples)" in shown
    samples = [json.loads(line) for line in (run / "harness_samples.jsonl").read_text().splitlines()]
    assert [sample["task"] for sample in samples].count("local_gen") == 3
    (event,) = find_events(run / LEDGER_NAME, "harness")
    for kind in ("report", "samples"):
        assert event.data[kind]["sha256"] == sha256_file(run / event.data[kind]["path"])
    assert event.data["root"] == report["about"]["root"]
    assert verify_documents(run) == []
    # Paths of this machine are no part of a result.
    assert str(tmp_path / "tasks") not in json.dumps(report["tasks"])


def test_of_a_benchmark_that_stays_unpublished_only_hashes_are_kept(words, tmp_path):
    text = (tmp_path / "tasks" / "local_gen.yaml").read_text().replace('"local_gen"', '"gpqa_of_ours"')
    (tmp_path / "tasks" / "gpqa.yaml").write_text(text)
    assert run_command([*words, "--tasks", "gpqa_of_ours", "--limit", "2", "--max-tokens", "4"]) == 0
    kept = (tmp_path / "run" / "harness_samples.jsonl").read_text()
    assert "Say one" not in kept
    assert all({"doc_hash", "exact_match"} <= json.loads(line).keys() for line in kept.splitlines())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "local_gen", "--limit", "0"], "limit must be at least 1"),
        (["--tasks", "local_gen", "--mode", "diffusion", "--steps", "2", "--threshold", "0.5"], "one mode at a time"),
        (["--tasks", "local_gen", "--mode", "diffusion", "--steps", "0"], "at least 1"),
        (["--tasks", "local_gen", "--mode", "parent"], "mode"),
    ],
)
def test_what_cannot_be_asked_is_one_line(words, flags, said, capsys):
    assert run_command([*words, *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert said in error


def test_a_task_that_neither_the_user_nor_the_library_has_is_named(words, monkeypatch, capsys):
    real, asked = harness._index_tasks, []

    def index(include, *, defaults):
        asked.append(defaults)
        return real(include, defaults=False)

    # Reading all files of the library takes a minute.
    monkeypatch.setattr(harness, "_index_tasks", index)
    assert run_command([*words, "--tasks", "of-nobody", "--tasks", "local_gen"]) == 2
    assert "lm-eval knows no such task (given: of-nobody)" in capsys.readouterr().err
    assert asked == [False, True]


def test_no_task_and_no_library_are_errors(words, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="no task"):
        HarnessConfig(tasks=())
    monkeypatch.setattr("ar2diff.pipelines.harness.find_spec", lambda name: None)
    assert run_command([*words, "--tasks", "local_gen"]) == 2
    assert "ar2diff[eval]" in capsys.readouterr().err
