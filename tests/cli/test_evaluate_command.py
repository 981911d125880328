"""`ar2diff evaluate`: one table from flags, and wrong inputs that leave no run directory."""

import json

import pytest

from ar2diff.cli import app, run
from ar2diff.models.loading import save_model
from ar2diff.provenance.documents import verify_documents
from ar2diff.testing.models import tiny_diffusion, tiny_model


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    save_model(folder, tiny_model(2, max_seq_len=512), tiny_diffusion())
    return folder


@pytest.fixture
def words(converted, tiny_parent, tmp_path):
    return ["evaluate", str(converted), "--base", str(tiny_parent), "--out", str(tmp_path / "run")]


def test_the_flags_choose_problems_modes_and_settings(words, tmp_path, capsys):
    chosen = ["--tasks", "structured?count=2&start=3", "--modes", "ar,diffusion"]
    short = ["--max-tokens", "5", "--precision", "fp32"]
    assert run([*words, *chosen, *short, "--steps", "3", "--thresholds", "0.5"]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out
    assert "x AR" in shown.out
    stored = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert list(dict.fromkeys(score["mode"] for score in stored["scores"])) == [
        "ar",
        "diffusion, steps=3",
        "diffusion, threshold=0.5",
    ]
    assert stored["about"]["settings"]["problems"] == [{"task": "structured", "count": 2, "start": 3, "source": ""}]
    assert verify_documents(tmp_path / "run") == []
    assert json.loads((tmp_path / "run" / "architecture.json").read_text())["engine"]["prefill_chunk"] == 512


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "structured?count=x"], "count is not a whole number"),
        (["--tasks", "no-such-task?count=1"], "unknown task"),
        (["--modes", "fast"], "unknown mode"),
        (["--steps", "0"], "at least 1"),
        (["--thresholds", "2"], "at most 1"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--minutes", "0"], "minutes"),
        (["--precision", "fp8"], "precision"),
    ],
)
def test_a_wrong_input_is_one_line_and_leaves_no_run_directory(words, tmp_path, capsys, flags, said):
    assert run([*words, *flags]) == 2
    shown = capsys.readouterr()
    assert (shown.err.startswith("error: "), shown.err.count("\n"), shown.out) == (True, 1, "")
    assert said in shown.err
    assert not (tmp_path / "run").exists()


def test_an_absent_model_leaves_no_run_directory(words, tmp_path, capsys):
    for place in (1, 3):
        assert run([*words[:place], str(tmp_path / "absent"), *words[place + 1 :]]) == 2
        assert "no model folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_parent_in_place_of_a_checkpoint_is_refused(words, tiny_parent, capsys):
    assert run(["evaluate", str(tiny_parent), *words[2:]]) == 2
    assert "error: not a converted model" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["1,2,4"], ["1", "2", "4"], ["1, 2", "4"]])
def test_several_numbers_are_one_word_or_several_options(given):
    words = [word for value in given for word in ("--steps", value)]
    _, bound, _ = app.parse_args(["evaluate", "model", "--base", "base", "--out", "run", *words])
    assert bound.arguments["steps"] == (1, 2, 4)


def test_a_word_that_is_no_number_is_named(words, capsys):
    assert run([*words, "--thresholds", "0.5,high"]) == 2
    assert '"high" is no number' in capsys.readouterr().err
