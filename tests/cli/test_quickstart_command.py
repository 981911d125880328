"""`ar2diff quickstart` on a tiny base: converts, compares, shows an answer being denoised, says what to do next."""

import re
from pathlib import Path

import pytest

from ar2diff.cli import run
from ar2diff.cli.quickstart import RECIPE_NAME
from ar2diff.cli.run import execute
from ar2diff.pipelines.recipe import find_recipe, load_recipe
from ar2diff.sources.embedded import EMBEDDED_NAME
from ar2diff.train.checkpoint import list_checkpoints


@pytest.fixture
def words(tiny_hub, tmp_path, monkeypatch):
    """The command with the shipped recipe replaced by one whose base and data are on the loopback hub."""
    recipe = tiny_hub.write_recipe(tmp_path)

    def execute_there(*args, options, **named):
        return execute(*args, options={**options, "endpoint": tiny_hub.endpoint}, **named)

    monkeypatch.setattr("ar2diff.pipelines.recipe.find_recipe", lambda name: recipe)
    monkeypatch.setattr("ar2diff.cli.quickstart.execute", execute_there)
    return ["quickstart", "--out", str(tmp_path / "run"), "--cache", str(tmp_path / "cache")]


def test_the_shipped_recipe_needs_the_package_index_alone():
    recipe = load_recipe(find_recipe(RECIPE_NAME))
    assert recipe.base.source == EMBEDDED_NAME
    assert all(share.is_procedural for share in recipe.data.sources)
    assert recipe.train.minutes is not None
    assert recipe.evaluate.minutes is not None
    assert recipe.train.minutes + recipe.evaluate.minutes <= 13


def test_a_first_run_ends_with_a_table_an_answer_and_the_next_commands(words, tmp_path, capsys):
    assert run([*words, "--minutes", "0.01"]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out
    assert "diffusion steps=1" in shown.out
    assert re.search(r"pass 1 .*\S", shown.out)
    (checkpoint,) = list_checkpoints(tmp_path / "run")[-1:]
    assert f"ar2diff chat {checkpoint}" in shown.out
    assert "--minutes" in shown.out
    for name in ("eval.json", "loss.png", "DOWNLOADS.md", "architecture.json"):
        assert (tmp_path / "run" / name).is_file()
    assert Path(tmp_path / "run" / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_a_stop_says_how_to_go_on_with_the_same_budget(words, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ar2diff.pipelines.run.prepare_data", interrupted)
    assert run([*words, "--minutes", "2.5"]) == 130
    out = capsys.readouterr().out
    assert out == f"stopped; go on with: ar2diff quickstart --minutes 2.5 --out {tmp_path / 'run'}\n"


@pytest.mark.parametrize("minutes", ["-1", "0", "soon"])
def test_a_wrong_budget_is_refused_before_anything_is_made(words, tmp_path, capsys, minutes):
    assert run([*words, "--minutes", minutes]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()
