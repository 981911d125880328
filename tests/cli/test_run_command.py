"""`ar2diff run`: a whole recipe from the command line, stopped and continued, and every wrong input in one line."""

import json
import shutil
import signal
import subprocess
import sys

import pytest

from ar2diff.cli import run
from ar2diff.errors import SpaceError
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.train.checkpoint import list_checkpoints


def listing(folder):
    """Every file below a folder with its bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def words(tiny_hub, cache, tmp_path):
    """The command's words but for the recipe."""
    return ["--out", str(tmp_path / "run"), "--endpoint", tiny_hub.endpoint, "--cache", str(cache)]


@pytest.fixture(scope="module")
def finished(tiny_hub, cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    recipe = tiny_hub.write_recipe(folder)
    assert (
        run(
            ["run", str(recipe), "--out", str(folder / "run"), "--endpoint", tiny_hub.endpoint, "--cache", str(cache)]
        )
        == 0
    )
    return folder / "run"


@pytest.fixture
def run_dir(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def refused(tokens, capsys, *, below):
    """The one line that a wrong command leaves; nothing below the folder changes."""
    before = listing(below)
    capsys.readouterr()
    assert run(tokens) == 2
    shown = capsys.readouterr()
    assert listing(below) == before
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    return shown.err


def test_the_whole_chain_prints_plain_progress_then_the_table_and_the_checkpoint(tiny_hub, words, tmp_path, capsys):
    recipe = tiny_hub.write_recipe(tmp_path)
    assert run(["run", str(recipe), *words]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err + shown.out
    stages = [line for line in shown.err.splitlines() if line[:1].isdigit()]
    assert stages == [
        "1. Fetching the base model",
        "2. Fetching training data",
        "3. Preparing data",
        "4. Converting",
        "5. Evaluating",
    ]
    assert "  procedural:structured: 6 of 6\n" in shown.err
    assert "step 3  diffusion " in shown.err
    assert "  evaluation: 28 of 28\n" in shown.err
    assert "diffusion steps=2" in shown.out
    assert "/ pass" in shown.out
    assert shown.out.splitlines()[-1] == str(tmp_path / "run" / "checkpoints" / "step-000003")
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["scores"]


def test_a_shipped_recipe_is_known_by_its_name(monkeypatch, tmp_path):
    asked = {}

    def fake(recipe, context, **options):
        asked["recipe"] = recipe
        raise KeyboardInterrupt

    monkeypatch.setattr("ar2diff.pipelines.run.run_recipe", fake)
    assert run(["run", "minicpm5-2b_h200", "--out", str(tmp_path / "run")]) == 130
    assert asked["recipe"].base.source.startswith("hub:openbmb/MiniCPM5-2B@")


def test_ctrl_c_before_training_says_how_to_go_on(tiny_hub, words, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    recipe = tiny_hub.write_recipe(tmp_path)
    monkeypatch.setattr("ar2diff.pipelines.run.prepare_data", interrupted)
    assert run(["run", str(recipe), *words]) == 130
    assert capsys.readouterr().out == f"stopped; go on with: ar2diff run {recipe} --out {tmp_path / 'run'}\n"


def test_ctrl_c_in_training_saves_and_going_on_finishes(tiny_hub, words, tmp_path):
    recipe = tiny_hub.write_recipe(tmp_path, steps=30, save_every=1000)
    command = [sys.executable, "-m", "ar2diff", "run", str(recipe), *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("step 2 "):
            child.send_signal(signal.SIGINT)
            break
    out, _ = child.communicate(timeout=120)
    assert child.returncode == 130
    (checkpoint,) = list_checkpoints(tmp_path / "run")
    assert out == f"stopped; go on with: ar2diff run {recipe} --out {tmp_path / 'run'} --resume\n"
    assert checkpoint.name < "step-000030"
    assert run(["run", str(recipe), *words, "--resume"]) == 0
    starts = find_events(tmp_path / "run" / LEDGER_NAME, "train_started")
    assert [f"step-{event.data['step']:06d}" for event in starts] == ["step-000000", checkpoint.name]
    assert list_checkpoints(tmp_path / "run")[-1].name == "step-000030"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("micro = 1", "mikro = 1", "unknown recipe key (given: train.mikro). The nearest known key is micro"),
        ("steps = 3\n", "steps = -3\n", "steps must be at least 1 (given: -3)"),
        ("micro = 1", 'micro = "1"', "recipe key train.micro"),
        ("[train]", "[train", "not readable TOML"),
    ],
)
def test_a_wrong_recipe_leaves_no_run_directory(tiny_hub, words, tmp_path, capsys, old, new, said):
    recipe = tiny_hub.write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace(old, new))
    assert said in refused(["run", str(recipe), *words], capsys, below=tmp_path)
    assert not (tmp_path / "run").exists()


def test_an_absent_recipe_or_device_leaves_no_run_directory(tiny_hub, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = str(tiny_hub.write_recipe(tmp_path))
    assert "no such recipe" in refused(["run", "absent.toml", *words], capsys, below=tmp_path)
    assert "no such recipe" in refused(["run", "absent", *words], capsys, below=tmp_path)
    assert "no CUDA device" in refused(["run", recipe, *words, "--device", "cuda"], capsys, below=tmp_path)
    assert "no checkpoint to go on from" in refused(["run", recipe, *words, "--resume"], capsys, below=tmp_path)
    assert not (tmp_path / "run").exists()


def test_the_directory_of_another_run_is_left_as_it_is(tiny_hub, run_dir, words, tmp_path, capsys):
    recipe = tiny_hub.write_recipe(tmp_path, steps=4)
    line = refused(["run", str(recipe), *words], capsys, below=tmp_path)
    assert "belongs to another run: other settings in section train" in line


def test_a_file_in_place_of_the_run_directory_is_named(tiny_hub, words, tmp_path, capsys):
    (tmp_path / "run").write_text("mine")
    recipe = tiny_hub.write_recipe(tmp_path)
    assert "cannot write into the folder" in refused(["run", str(recipe), *words], capsys, below=tmp_path)


def test_a_corrupt_checkpoint_is_named_with_what_to_do(tiny_hub, run_dir, words, tmp_path, capsys):
    weights = list_checkpoints(run_dir)[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    asked = (
        ["run", str(tiny_hub.write_recipe(tmp_path)), *words],
        ["generate", str(weights.parent), "--prompt", "x"],
        ["evaluate", str(weights.parent), "--base", str(run_dir / "base"), "--out", str(tmp_path / "run")],
    )
    for tokens in asked:
        capsys.readouterr()
        assert run(tokens) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: model.safetensors is missing or was changed")


def test_a_checkpoint_decodes_without_its_optimizer(run_dir, capsys):
    checkpoint = list_checkpoints(run_dir)[-1]
    (checkpoint / "optimizer.safetensors").unlink()
    assert run(["generate", str(checkpoint), "--prompt", "x", "--max-tokens", "3"]) == 0


def test_a_full_disk_is_one_line_and_leaves_no_half_file(tiny_hub, run_dir, words, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr("ar2diff.files.shutil.disk_usage", lambda folder: usage)
    shutil.rmtree(run_dir)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    fresh = [*words[:-1], str(tmp_path / "cache")]
    capsys.readouterr()
    assert run(["run", str(tiny_hub.write_recipe(tmp_path)), *fresh]) == SpaceError.exit_code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "not enough free space" in last
    assert [path for path in (tmp_path / "run").rglob("*") if ".partial-" in path.name] == []
