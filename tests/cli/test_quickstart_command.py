"""`ar2diff quickstart` on a tiny base: with the adapter that came along or from the base, down to what to do next."""

import json
import re
from dataclasses import replace

import pytest
import torch

from ar2diff.cli import run
from ar2diff.cli.quickstart import ADAPTER_NAME, ADAPTER_RECIPE_NAME, RECIPE_NAME
from ar2diff.cli.run import execute, open_context
from ar2diff.models.adapter_file import ADAPTER_WEIGHTS_NAME, read_adapter
from ar2diff.pipelines.recipe import find_recipe, load_recipe
from ar2diff.pipelines.ship import ship_adapter
from ar2diff.provenance.ledger import LEDGER_NAME, find_events, read_ledger
from ar2diff.sources import shipped
from ar2diff.sources.spec import EMBEDDED_NAME
from ar2diff.train.checkpoint import list_checkpoints

ADAPTED = """
[train.adapter]
rank = 2
alpha = 4.0

[train.objective]
ar_weight = 0.0
anchor = "last"
"""
FALLS_BACK = "no adapter came with this ar2diff: converting the base itself, as with --from-scratch\n"


@pytest.fixture(scope="module")
def recipes(tiny_hub, tmp_path_factory):
    """The recipes of both ways, whose base and data are on the loopback hub, by the names of the real ones."""
    folder = tmp_path_factory.mktemp("recipes")
    scratch = tiny_hub.recipe_text()
    adapted = scratch.replace("\n[train.objective]\n", ADAPTED)
    named = adapted.replace("[base]", f'[base]\nadapter = "shipped:{ADAPTER_NAME}"')
    for name, text in ((RECIPE_NAME, scratch), ("plain", adapted), (ADAPTER_RECIPE_NAME, named)):
        (folder / f"{name}.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def packed(recipes, tiny_hub, tmp_path_factory):
    """A place for shipped adapters with one of the tiny base in it."""
    folder = tmp_path_factory.mktemp("packed")
    options = {"endpoint": tiny_hub.endpoint}
    execute(
        load_recipe(recipes / "plain.toml"), folder / "run", resume=False, cache=folder / "cache", options=options
    )
    ship_adapter(folder / "run", ADAPTER_NAME, folder / "shipped")
    return folder / "shipped"


@pytest.fixture
def words(recipes, tiny_hub, tmp_path, monkeypatch):
    """The command where no adapter came along."""

    def execute_there(*args, options, **named):
        return execute(*args, options={**options, "endpoint": tiny_hub.endpoint}, **named)

    def open_there(*args, options, **named):
        return open_context(*args, options={**options, "endpoint": tiny_hub.endpoint}, **named)

    monkeypatch.setattr("ar2diff.pipelines.recipe.find_recipe", lambda name: recipes / f"{name}.toml")
    monkeypatch.setattr("ar2diff.cli.quickstart.execute", execute_there)
    monkeypatch.setattr("ar2diff.cli.quickstart.open_context", open_there)
    monkeypatch.setattr(shipped, "SHIPPED_DIR", tmp_path / "shipped")
    return ["quickstart", "--out", str(tmp_path / "run"), "--cache", str(tmp_path / "cache")]


@pytest.fixture
def with_adapter(words, packed, monkeypatch):
    """The command where one did."""
    monkeypatch.setattr(shipped, "SHIPPED_DIR", packed)
    return words


def types_of(run_dir):
    return [event.type for event in read_ledger(run_dir / LEDGER_NAME)]


@pytest.mark.parametrize("name", [RECIPE_NAME, ADAPTER_RECIPE_NAME])
def test_the_shipped_recipes_need_the_package_index_alone(name):
    recipe = load_recipe(find_recipe(name))
    assert recipe.base.source == EMBEDDED_NAME
    assert all(share.is_procedural for share in recipe.data.sources)
    assert recipe.train.minutes is not None
    assert recipe.evaluate.minutes is not None
    assert recipe.train.minutes + recipe.evaluate.minutes <= 13


def test_the_recipe_on_the_adapter_goes_on_as_the_one_that_trained_it():
    trained, goes_on = (load_recipe(find_recipe(name)) for name in ("smollm2-135m_adapter", ADAPTER_RECIPE_NAME))
    assert goes_on.base == replace(trained.base, adapter=f"shipped:{ADAPTER_NAME}")
    assert goes_on.train.adapter == trained.train.adapter
    assert goes_on.train.objective == trained.train.objective
    assert goes_on.train.precision == trained.train.precision
    assert goes_on.data.evaluation == trained.data.evaluation
    assert goes_on.train.optim.lr < trained.train.optim.lr
    # On other problems than those that it knows.
    known = {share.source: share.start + share.count for share in trained.data.sources if share.is_procedural}
    assert all(share.start >= known[share.source] for share in goes_on.data.sources)


@pytest.mark.parametrize("flag", ["", " --from-scratch"])
def test_without_an_adapter_the_base_is_converted_and_that_is_said(words, tmp_path, capsys, flag):
    assert run([*words, *flag.split(), "--minutes", "0.01"]) == 0
    shown, run_dir = capsys.readouterr(), tmp_path / "run"
    assert "\x1b" not in shown.out
    assert shown.out.startswith(FALLS_BACK) == (not flag)
    assert "diffusion steps=1" in shown.out
    assert re.search(r"pass 1 .*\S", shown.out)
    assert f"ar2diff chat {list_checkpoints(run_dir)[-1]}\n" in shown.out
    assert f"ar2diff quickstart{flag} --minutes 60" in shown.out
    assert "adapter_applied" not in types_of(run_dir)
    for name in ("eval.json", "loss.png", "DOWNLOADS.md", "architecture.json"):
        assert (run_dir / name).is_file()
    assert (run_dir / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_an_adapter_is_shown_first_then_trained_on_and_compared(with_adapter, packed, tmp_path, capsys):
    assert run([*with_adapter, "--minutes", "0.01"]) == 0
    shown, run_dir = capsys.readouterr(), tmp_path / "run"
    assert FALLS_BACK not in shown.out
    places = [shown.out.index(text) for text in ("pass 1", "Converted model beside", "Before and after training")]
    assert places == sorted(places)
    assert shown.out.count("Converted model beside its AR parent") == 2
    assert shown.out.count("One answer being denoised") == 1
    assert "on the same 2 problems" in shown.out
    stages = re.findall(r"^\d+\. (.*)$", shown.err, re.MULTILINE)
    assert stages[:4] == ["Fetching the base model", "Applying the adapter", "A first look", "Evaluating"]
    assert stages[-2:] == ["Converting", "Evaluating"]
    checkpoint = list_checkpoints(run_dir)[-1]
    assert f"ar2diff chat {checkpoint}\n" in shown.out
    stored = packed / ADAPTER_NAME / ADAPTER_WEIGHTS_NAME
    assert (run_dir / "start" / ADAPTER_WEIGHTS_NAME).read_bytes() == stored.read_bytes()
    before, after = read_adapter(run_dir / "start"), read_adapter(checkpoint)
    assert any(not before.tensors[name].equal(after.tensors[name]) for name in before.tensors)


def test_the_first_look_leaves_nothing_in_the_run_and_is_not_taken_of_a_trained_one(with_adapter, tmp_path, capsys):
    assert run([*with_adapter, "--minutes", "0.01"]) == 0
    run_dir = tmp_path / "run"
    (evaluated,) = find_events(run_dir / LEDGER_NAME, "evaluate")
    (finished,) = find_events(run_dir / LEDGER_NAME, "conversion_finished")
    assert evaluated.data["roots"]["converted"] == finished.data["tensor_root"]
    (started,) = find_events(run_dir / LEDGER_NAME, "recipe_started")
    written = json.loads((run_dir / "eval.json").read_text())["about"]["settings"]
    assert started.data["recipe"]["evaluate"] == evaluated.data["settings"] == written
    capsys.readouterr()
    assert run([*with_adapter, "--minutes", "0.01"]) == 0
    shown = capsys.readouterr()
    assert "A first look" not in shown.err
    assert "Before and after" not in shown.out


def test_no_minutes_show_the_adapter_and_train_nothing(with_adapter, tmp_path, capsys):
    assert run([*with_adapter, "--minutes", "0"]) == 0
    shown, run_dir = capsys.readouterr(), tmp_path / "run"
    assert shown.out.count("Converted model beside its AR parent") == shown.out.count("One answer being") == 1
    assert f"ar2diff chat {run_dir / 'start'}\n" in shown.out
    assert f"ar2diff quickstart --out {run_dir}\n" in shown.out
    assert types_of(run_dir)[-1] == "adapter_applied"
    assert not {"eval.json", "checkpoints", "data"} & {path.name for path in run_dir.iterdir()}
    assert (run_dir / "DOWNLOADS.md").is_file()
    # The same folder can be trained in later.
    assert run([*with_adapter, "--minutes", "0.01"]) == 0
    assert types_of(run_dir).count("adapter_applied") == 1
    assert "Before and after" in capsys.readouterr().out


def test_a_look_into_a_folder_of_another_run_is_refused(with_adapter, tmp_path, capsys):
    assert run([*with_adapter, "--from-scratch", "--minutes", "0.01"]) == 0
    before, shown = types_of(tmp_path / "run"), capsys.readouterr()
    assert "Applying" not in shown.err
    assert FALLS_BACK not in shown.out
    assert not (tmp_path / "run" / "start").exists()
    assert run([*with_adapter, "--minutes", "0"]) == 2
    assert "another run" in capsys.readouterr().err
    assert types_of(tmp_path / "run") == before


@pytest.mark.parametrize("flag", ["", " --from-scratch"])
def test_a_stop_says_how_to_go_on_with_the_same_budget(words, tmp_path, capsys, monkeypatch, flag):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ar2diff.pipelines.run.prepare_data", interrupted)
    assert run([*words, *flag.split(), "--minutes", "2.5"]) == 130
    out = capsys.readouterr().out.removeprefix(FALLS_BACK)
    assert out == f"stopped; go on with: ar2diff quickstart{flag} --minutes 2.5 --out {tmp_path / 'run'}\n"


def test_a_stop_of_the_first_look_says_how_to_go_on_and_it_is_shown_again(
    with_adapter, tmp_path, capsys, monkeypatch
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ar2diff.pipelines.first_look.evaluate_run", interrupted)
        assert run([*with_adapter, "--minutes", "0.01"]) == 130
    stop = f"stopped; go on with: ar2diff quickstart --minutes 0.01 --out {tmp_path / 'run'}\n"
    assert capsys.readouterr().out.endswith(stop)
    assert run([*with_adapter, "--minutes", "0.01"]) == 0
    assert "Before and after" in capsys.readouterr().out


def test_training_has_the_threads_that_the_first_look_took(with_adapter, monkeypatch):
    seen, before = [], torch.get_num_threads()

    def prepare(*_):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr("ar2diff.cli.quickstart._show_denoising", lambda model: torch.set_num_threads(before + 1))
    monkeypatch.setattr("ar2diff.pipelines.run.prepare_data", prepare)
    assert run([*with_adapter, "--minutes", "0.01"]) == 130
    assert seen == [before]


@pytest.mark.parametrize("minutes", ["-1", "0", "soon"])
def test_a_wrong_budget_is_refused_before_anything_is_made(words, tmp_path, capsys, minutes):
    assert run([*words, "--minutes", minutes]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not (tmp_path / "run").exists()
