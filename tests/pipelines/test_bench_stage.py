"""`ar2diff bench`: every contestant at every batch size, who is absent and why, and wrong inputs in one line."""

import json

import pytest

from ar2diff.cli import run as run_command
from ar2diff.errors import ConfigError
from ar2diff.hashing import sha256_file
from ar2diff.models.loading import save_model
from ar2diff.pipelines.bench import BenchConfig
from ar2diff.provenance.documents import verify_documents
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.testing.models import tiny_diffusion, tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "child", tiny_model(2, max_seq_len=512), tiny_diffusion())
    save_model(folder / "parent", tiny_model(3, max_seq_len=512), None)
    other = tiny_model(3, max_seq_len=512)
    save_model(folder / "other", other, None)
    config = json.loads((folder / "other" / "tokenizer.json").read_text())
    config["added_tokens"][-1]["content"] = "<|other|>"
    (folder / "other" / "tokenizer.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def words(models, tmp_path):
    return ["bench", str(models / "child"), "--out", str(tmp_path / "run"), "--precision", "fp32", "--quick"]


def test_every_contestant_has_a_row_at_every_batch_size(words, models, tmp_path, capsys):
    assert run_command([*words, "--base", str(models / "parent")]) == 0
    shown = capsys.readouterr().out
    run = tmp_path / "run"
    stored = json.loads((run / "speed.json").read_text())
    names = ["parent", "ar", "verified", "verified+copies"]
    names += ["diffusion, steps=4", "diffusion, threshold=0.9", "transformers.generate"]
    assert [(row["name"], row["batch_size"]) for row in stored["rows"]] == [(n, s) for s in (1, 4) for n in names]
    assert all(row["tokens_per_s"] > 0 and row["first_token_s"] > 0 for row in stored["rows"])
    assert {row["name"]: row["over_ar"] for row in stored["rows"]}["ar"] == 1.0
    steps = next(row for row in stored["rows"] if row["name"] == "diffusion, steps=4")
    assert steps["passes_per_block"] is not None
    assert "llama.cpp" in stored["absent"]
    assert "absent: no GGUF file" in shown
    assert set(stored["about"]["roots"]) == {"parent", "converted"}
    (event,) = find_events(run / LEDGER_NAME, "bench")
    assert event.data["report"]["sha256"] == sha256_file(run / "speed.json")
    assert verify_documents(run) == []


def test_without_a_base_the_parent_is_left_out(words, tmp_path):
    assert run_command([*words, "--modes", "ar"]) == 0
    stored = json.loads((tmp_path / "run" / "speed.json").read_text())
    assert [row["name"] for row in stored["rows"]] == ["ar", "transformers.generate"] * 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--modes", "parent"], "needs the parent"),
        (["--modes", "fast"], "unknown mode"),
        (["--tasks", "structured?count=3"], "fewer prompts"),
        (["--tasks", "of-nobody"], "unknown task"),
    ],
)
def test_what_cannot_be_timed_is_one_line(words, flags, said, capsys):
    assert run_command([*words, *flags]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_base_of_another_tokenizer_is_refused(words, models, capsys):
    assert run_command([*words, "--base", str(models / "other")]) == 2
    assert "another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [{"batch_sizes": ()}, {"batch_sizes": (0,)}, {"batch_sizes": (2, 2)}, {"repeats": 0}, {"max_tokens": 0}],
)
def test_numbers_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError):
        BenchConfig(**settings)
