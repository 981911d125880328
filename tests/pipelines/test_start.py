"""A run that begins at a stored adapter: applied, logged, trained on from there, resumed and repeated; or refused."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
from watcher import Watcher

from ar2diff.errors import ConfigError, ModelError, RunError
from ar2diff.export.export import ExportOptions, export_model
from ar2diff.hashing import canonical_json, sha256_bytes, sha256_file, sha256_json
from ar2diff.models.adapter_file import ADAPTER_WEIGHTS_NAME, EXPORTED_NAMES, read_adapter
from ar2diff.models.adapters import AdapterConfig
from ar2diff.models.loading import load_model
from ar2diff.pipelines.run import check_run
from ar2diff.provenance.ledger import LEDGER_NAME, find_events, read_ledger
from ar2diff.sources import shipped


@pytest.fixture(scope="module")
def adapter(adapter_recipe, execute, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    result = execute(replace(adapter_recipe, evaluate=replace(adapter_recipe.evaluate, problems=())), folder / "run")
    export_model(result.checkpoint, "adapter", folder / "adapter", ExportOptions())
    return folder / "adapter"


@pytest.fixture(scope="module")
def recipe(adapter_recipe, adapter):
    return replace(adapter_recipe, base=replace(adapter_recipe.base, adapter=f"local:{adapter}"))


@pytest.fixture(scope="module")
def finished(recipe, execute, tmp_path_factory):
    folder, view = tmp_path_factory.mktemp("runs") / "run", Watcher()
    return folder, execute(recipe, folder, view=view), view


@pytest.fixture
def run_dir(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "run")


def train_with(recipe, **changes):
    return replace(recipe, train=replace(recipe.train, **changes))


def objective_with(recipe, **changes):
    return train_with(recipe, objective=replace(recipe.train.objective, **changes))


def stop_after(steps):
    asked = iter([False] * steps + [True])
    return lambda: nullcontext(lambda: next(asked))


def types_of(run_dir):
    return [event.type for event in read_ledger(run_dir / LEDGER_NAME)]


def rename_source(run_dir, source):
    """The run as if its recipe had named the adapter so; its ledger is chained anew."""
    head, lines = "0" * 64, []
    for line in (run_dir / LEDGER_NAME).read_bytes().splitlines():
        event = json.loads(line)
        if event["type"] == "recipe_started":
            event["data"]["recipe"]["base"]["adapter"] = source
            event["data"]["sha256"] = sha256_json(event["data"]["recipe"])
        if event["type"] == "adapter_applied":
            event["data"]["source"] = source
        written = canonical_json({**event, "prev": head})
        lines.append(written + b"\n")
        head = sha256_bytes(written)
    (run_dir / LEDGER_NAME).write_bytes(b"".join(lines))


def test_the_ledger_says_what_was_applied_to_what_and_what_came_out(finished, adapter):
    (applied,) = find_events(finished[0] / LEDGER_NAME, "adapter_applied")
    base, start = load_model(finished[0] / "base"), load_model(finished[0] / "start")
    assert applied.data == {
        "source": f"local:{adapter}",
        "folder": "start",
        "files": {name: sha256_file(adapter / name) for name in EXPORTED_NAMES},
        "base_tensor_root": base.tensor_root,
        "tensor_root": start.tensor_root,
    }
    kinds = types_of(finished[0])
    assert kinds.index("fetch") < kinds.index("adapter_applied") < kinds.index("prepare")


def test_training_begins_at_the_applied_adapter_and_evaluation_compares_with_the_base(finished):
    run_dir, result, view = finished
    (applied,) = find_events(run_dir / LEDGER_NAME, "adapter_applied")
    (started,) = find_events(run_dir / LEDGER_NAME, "train_started")
    (evaluated,) = find_events(run_dir / LEDGER_NAME, "evaluate")
    assert started.data["base_tensor_root"] == applied.data["tensor_root"]
    assert evaluated.data["roots"]["parent"] == applied.data["base_tensor_root"]
    assert evaluated.data["roots"]["converted"] == load_model(result.checkpoint).tensor_root
    before, after = read_adapter(run_dir / "start"), read_adapter(result.checkpoint)
    # Three steps of warming up move the matrices, and not far: they were not begun anew.
    assert any(not before.tensors[name].equal(after.tensors[name]) for name in before.tensors)
    assert all((before.tensors[name] - after.tensors[name]).abs().max() < 0.01 for name in before.tensors)
    assert view.stages[:2] == ["Fetching the base model", "Applying the adapter"]


def test_a_repeated_run_keeps_every_stage_even_if_the_adapter_is_gone(recipe, execute, finished, run_dir, tmp_path):
    gone = replace(recipe, base=replace(recipe.base, adapter=f"local:{tmp_path / 'gone'}"))
    rename_source(run_dir, f"local:{tmp_path / 'gone'}")
    view, before = Watcher(), types_of(run_dir)
    again = execute(gone, run_dir, view=view)
    assert types_of(run_dir)[len(before) :] == ["fetch", "fetch"]
    assert view.stages[1] == "Applying the adapter: done already"
    assert view.stages[-2:] == ["Converting: done already", "Evaluating: done already"]
    assert again.report == finished[1].report


def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(recipe, execute, finished, tmp_path):
    stopped = execute(recipe, tmp_path / "run", watch_for_stop=stop_after(1))
    assert stopped.interrupted
    result = execute(recipe, tmp_path / "run", resume=True)
    assert load_model(result.checkpoint).tensor_root == load_model(finished[1].checkpoint).tensor_root
    assert types_of(tmp_path / "run").count("adapter_applied") == 1


def test_a_run_killed_between_applying_and_logging_applies_again_and_logs_it(recipe, execute, finished, run_dir):
    lines = (run_dir / LEDGER_NAME).read_bytes().splitlines(keepends=True)
    kept = types_of(run_dir).index("adapter_applied")
    (run_dir / LEDGER_NAME).write_bytes(b"".join(lines[:kept]))
    for name in ("checkpoints", "run.json", "data", "metrics.jsonl"):
        path = run_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    result = execute(recipe, run_dir)
    assert types_of(run_dir).count("adapter_applied") == 1
    assert load_model(result.checkpoint).tensor_root == load_model(finished[1].checkpoint).tensor_root


@pytest.mark.parametrize("name", ["model.safetensors", ADAPTER_WEIGHTS_NAME, "block_diffusion.json"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_changed_start_is_never_trained_from(recipe, execute, run_dir, name, is_missing):
    path = run_dir / "start" / name
    content = bytearray(path.read_bytes())
    path.unlink()
    if not is_missing:
        content[-3 if name.endswith("safetensors") else -1] ^= 1
        path.write_bytes(bytes(content))
    with pytest.raises((RunError, ModelError)):
        execute(recipe, run_dir)


def test_a_lost_start_is_made_again_from_the_same_adapter_alone(recipe, execute, adapter, run_dir, tmp_path):
    before = {path.name: path.read_bytes() for path in (run_dir / "start").iterdir()}
    shutil.rmtree(run_dir / "start")
    execute(recipe, run_dir)
    assert {path.name: path.read_bytes() for path in (run_dir / "start").iterdir()} == before
    assert types_of(run_dir).count("adapter_applied") == 1
    shutil.rmtree(run_dir / "start")
    other = shutil.copytree(adapter, tmp_path / "other")
    path = other / "block_diffusion.json"
    path.write_text(path.read_text() + "\n")
    rename_source(run_dir, f"local:{other}")
    with pytest.raises(RunError, match="another one than this run began with"):
        execute(replace(recipe, base=replace(recipe.base, adapter=f"local:{other}")), run_dir)
    assert not (run_dir / "start").exists()


OTHERS = {
    "rank": lambda recipe: train_with(recipe, adapter=AdapterConfig(rank=3, alpha=4.0)),
    "scale": lambda recipe: train_with(recipe, adapter=AdapterConfig(rank=2, alpha=5.0)),
    "places": lambda recipe: train_with(recipe, adapter=AdapterConfig(rank=2, alpha=4.0, targets=("q_proj",))),
    "anchor": lambda recipe: objective_with(recipe, anchor="predicted"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_than_the_adapters_are_refused_before_anything_is_written(recipe, tmp_path, name):
    with pytest.raises(ConfigError, match=f"stored adapter.*{name if name == 'anchor' else ''}"):
        check_run(OTHERS[name](recipe), tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), [("clean_attention", "block"), ("shift_logits", False)])
def test_an_adapter_that_was_trained_for_another_objective_is_named(recipe, adapter, tmp_path, name, value):
    other = shutil.copytree(adapter, tmp_path / "other")
    stored = json.loads((other / "block_diffusion.json").read_text())
    stored = {**stored, "anchor": "predicted", name: value}
    (other / "block_diffusion.json").write_text(json.dumps(stored))
    asked = objective_with(recipe, anchor="predicted")
    with pytest.raises(ConfigError, match=f"another {name}.*{value}"):
        check_run(replace(asked, base=replace(asked.base, adapter=f"local:{other}")), tmp_path / "run", resume=False)


def test_an_adapter_of_another_base_is_refused_and_both_roots_are_named(recipe, adapter, execute, tmp_path):
    other = shutil.copytree(adapter, tmp_path / "other")
    stored = json.loads((other / "adapter_config.json").read_text())
    stored["ar2diff"]["base_tensor_root"] = "5" * 64
    (other / "adapter_config.json").write_text(json.dumps(stored))
    changed = replace(recipe, base=replace(recipe.base, adapter=f"local:{other}"))
    with pytest.raises(ModelError, match="another base.*" + "5" * 64):
        execute(changed, tmp_path / "run")
    assert not (tmp_path / "run" / "start").exists()


@pytest.mark.parametrize("text", ["hub:maker/adapter", "adapter", ""])
def test_an_adapter_is_named_as_shipped_or_local(adapter_recipe, text):
    with pytest.raises(ConfigError, match="shipped:NAME or local:PATH"):
        replace(adapter_recipe.base, adapter=text)


def test_a_stored_adapter_without_settings_to_train_it_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"Add \[train.adapter\]"):
        train_with(recipe, adapter=None)


def test_an_adapter_that_is_not_there_is_refused_before_anything_is_written(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "SHIPPED_DIR", tmp_path / "shipped")
    for source, said in (("local:nowhere", "no exported adapter"), ("shipped:none", "no adapter of that name")):
        asked = replace(recipe, base=replace(recipe.base, adapter=source))
        with pytest.raises((ConfigError, ModelError), match=said):
            check_run(asked, tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()


def test_another_adapter_on_the_folder_is_another_run(recipe, execute, run_dir):
    with pytest.raises(RunError, match=r"another run.*base"):
        execute(replace(recipe, base=replace(recipe.base, adapter="local:elsewhere")), run_dir)


def test_a_recipe_without_an_adapter_is_recorded_as_it_was_before_there_was_a_choice(adapter_recipe):
    assert adapter_recipe.as_json()["base"] == {"source": adapter_recipe.base.source}
