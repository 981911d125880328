"""A recipe from start to end on a tiny model: everything is logged, kept, refused and continued as promised."""

import json
import shutil
from dataclasses import replace

import pytest
from watcher import Watcher

from ar2diff.clock import SystemClock
from ar2diff.errors import CheckpointError, ConfigError, RunError
from ar2diff.models.loading import load_model
from ar2diff.pipelines.recipe import parse_recipe
from ar2diff.pipelines.run import never_stop
from ar2diff.pipelines.stages import RunContext, build_problems, check_device
from ar2diff.provenance.documents import verify_documents
from ar2diff.provenance.ledger import LEDGER_NAME, find_events, read_ledger, verify_ledger
from ar2diff.train.checkpoint import list_checkpoints


@pytest.fixture(scope="session")
def recipe(tiny_hub):
    import tomllib

    return parse_recipe(tomllib.loads(tiny_hub.recipe_text()))


@pytest.fixture(scope="session")
def finished(recipe, execute, tmp_path_factory):
    """A run that went through; tests that change it take a copy."""
    run_dir, view = tmp_path_factory.mktemp("runs") / "tiny", Watcher()
    return run_dir, execute(recipe, run_dir, view=view), view


@pytest.fixture
def run_dir(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


def unfinished(run_dir, *, num_steps=2):
    """Make the finished run look as if it had stopped after so many steps, its ledger cut accordingly."""
    lines = (run_dir / LEDGER_NAME).read_bytes().splitlines(keepends=True)
    kept = [json.loads(line)["type"] for line in lines].index("checkpoint_saved") + num_steps
    (run_dir / LEDGER_NAME).write_bytes(b"".join(lines[:kept]))
    for path in list_checkpoints(run_dir)[num_steps:]:
        shutil.rmtree(path)
    return run_dir


def events_of(run_dir):
    return list(read_ledger(run_dir / LEDGER_NAME))


def test_the_ledger_holds_every_stage_in_order(finished):
    verify_ledger(finished[0] / LEDGER_NAME)
    assert [event.type for event in events_of(finished[0])] == [
        "run_started",
        "recipe_started",
        "fetch",
        "fetch",
        "prepare",
        "code",
        "train_started",
        "checkpoint_saved",
        "checkpoint_saved",
        "checkpoint_saved",
        "train_finished",
        "conversion_finished",
        "evaluate",
        "export_targets",
    ]


def test_the_documents_follow_from_the_ledger_and_leave_no_field_empty(finished, tiny_hub):
    run_dir = finished[0]
    assert verify_documents(run_dir) == []
    written = json.loads((run_dir / "architecture.json").read_text())
    assert written["base"] == f"hub:tiny/parent@{tiny_hub.model}"
    assert (written["mask_token"], written["mask_token_id"], written["block_size"]) == ("<|mask|>", 258, 4)
    assert written["shift_logits"] is True
    assert written["objective"]["ar_weight"] == 0.5
    assert written["engine"]["row_multiple"] == 2
    assert [item["source"] for item in written["data"][0]["sources"]] == [
        "procedural:structured",
        f"hub:datasets/tiny/chat@{tiny_hub.chat}#files=data/*",
    ]
    assert all(written[name] is not None for name in written)
    downloads = (run_dir / "DOWNLOADS.md").read_text()
    assert "| model.safetensors |" in downloads
    assert "| data/train.parquet |" in downloads
    card = (run_dir / "MODEL_CARD.md").read_text()
    assert "Open to `ar2diff export`: hf, gguf." in card
    assert "- adapter is closed: the model has no mask-gated adapter." in card


def test_the_run_ends_with_a_loadable_converted_model_and_a_report(finished):
    run_dir, result, view = finished
    assert load_model(result.checkpoint).diffusion.block_size == 4
    assert not result.interrupted
    assert json.loads((run_dir / "eval.json").read_text())["scores"] == result.report.as_json()["scores"]
    assert view.answers == len(result.report.answers) == 4 * 7
    assert view.data_seen == {"procedural:structured", events_of(run_dir)[3].data["source"]}
    assert view.stages == [
        "Fetching the base model",
        "Fetching training data",
        "Preparing data",
        "Converting",
        "Evaluating",
    ]


def test_a_second_run_keeps_every_finished_stage(recipe, execute, finished, run_dir):
    before, view = events_of(run_dir), Watcher()
    again = execute(recipe, run_dir, view=view)
    added = events_of(run_dir)[len(before) :]
    assert [(event.type, event.data["cached"]) for event in added] == [("fetch", True), ("fetch", True)]
    assert view.stages[-2:] == ["Converting: done already", "Evaluating: done already"]
    assert again.report == finished[1].report
    assert again.checkpoint.name == finished[1].checkpoint.name
    assert verify_documents(run_dir) == []


@pytest.mark.parametrize("name", ["eval.json", "eval_samples.jsonl"])
def test_an_evaluation_whose_files_were_changed_is_made_again(recipe, execute, run_dir, name):
    (run_dir / name).write_text("{}")
    execute(recipe, run_dir)
    assert [event.type for event in events_of(run_dir)].count("evaluate") == 2


def test_other_evaluation_settings_are_evaluated_on_the_same_run(recipe, execute, run_dir):
    other = replace(recipe, evaluate=replace(recipe.evaluate, modes="ar", bits_problems=0))
    report = execute(other, run_dir).report
    assert {answer.mode for answer in report.answers} == {"ar"}
    assert report.bits_per_token == {}
    assert [event.type for event in events_of(run_dir)].count("train_started") == 1


def test_a_recipe_without_problems_has_no_report(recipe, execute, run_dir):
    assert execute(replace(recipe, evaluate=replace(recipe.evaluate, problems=())), run_dir).report is None
    with pytest.raises(ConfigError, match="no problems"):
        build_problems(())


def test_an_unfinished_training_asks_for_resume_and_then_ends_as_if_it_had_never_stopped(
    recipe, execute, finished, run_dir
):
    unfinished(run_dir)
    with pytest.raises(RunError, match=r"unfinished training.*--resume"):
        execute(recipe, run_dir)
    result = execute(recipe, run_dir, resume=True)
    started = [event for event in events_of(run_dir) if event.type == "train_started"]
    assert started[-1].data["step"] == 2
    assert load_model(result.checkpoint).tensor_root == load_model(finished[1].checkpoint).tensor_root


def test_a_stop_between_steps_saves_and_going_on_finishes(recipe, execute, tmp_path):
    from contextlib import contextmanager

    @contextmanager
    def after_one():
        asked = iter((False, True))
        yield lambda: next(asked)

    result = execute(recipe, tmp_path / "run", watch_for_stop=after_one)
    assert (result.interrupted, result.report, result.checkpoint.name) == (True, None, "step-000001")
    assert not (tmp_path / "run" / "eval.json").exists()
    assert verify_documents(tmp_path / "run") == []
    short = replace(recipe, evaluate=replace(recipe.evaluate, problems=()))
    assert not execute(short, tmp_path / "run", resume=True, watch_for_stop=never_stop).interrupted


@pytest.mark.parametrize("section", ["base", "data", "train"])
def test_another_recipe_on_the_folder_is_refused_before_anything_is_written(recipe, execute, run_dir, section):
    changed = {
        "base": replace(recipe.base, source=recipe.base.source + "#files=*"),
        "data": replace(recipe.data, max_document_len=400),
        "train": replace(recipe.train, seed=5),
    }
    before = (run_dir / LEDGER_NAME).read_bytes()
    with pytest.raises(RunError, match=f"another run.*{section}"):
        execute(replace(recipe, **{section: changed[section]}), run_dir)
    assert (run_dir / LEDGER_NAME).read_bytes() == before


def test_a_folder_that_another_command_trained_in_is_refused(recipe, execute, run_dir):
    (run_dir / LEDGER_NAME).unlink()
    with pytest.raises(RunError, match="another run"):
        execute(recipe, run_dir)


def test_resume_without_a_checkpoint_is_refused(recipe, execute, tmp_path):
    with pytest.raises(RunError, match="no checkpoint to go on from"):
        execute(recipe, tmp_path / "run", resume=True)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.json"])
def test_a_damaged_newest_checkpoint_is_passed_over_aloud_for_the_one_before(recipe, execute, run_dir, name):
    broken = unfinished(run_dir) / "checkpoints" / "step-000002" / name
    content = bytearray(broken.read_bytes())
    content[-3] ^= 1
    broken.write_bytes(bytes(content))
    with pytest.warns(RuntimeWarning, match="step-000002"):
        assert not execute(recipe, run_dir, resume=True).interrupted
    (skipped,) = find_events(run_dir / LEDGER_NAME, "checkpoint_skipped")
    assert skipped.data["checkpoint"] == "step-000002"
    starts = find_events(run_dir / LEDGER_NAME, "train_started")
    assert starts[-1].data["resumed"]["checkpoint"] == "step-000001"


def test_a_damaged_only_checkpoint_is_no_start(recipe, execute, run_dir):
    (unfinished(run_dir, num_steps=1) / "checkpoints" / "step-000001" / "model.safetensors").unlink()
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        execute(recipe, run_dir, resume=True)


def test_a_damaged_finished_checkpoint_is_never_evaluated(recipe, execute, run_dir):
    weights = run_dir / "checkpoints" / "step-000003" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="changed"):
        execute(recipe, run_dir)


def test_a_cuda_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_device("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        check_device("cuda")


def test_problems_of_all_domains_come_in_turn(recipe):
    problems = build_problems(recipe.evaluate.problems)
    assert [problem.domain for problem in problems[:2]] != [problems[0].domain] * 2
    assert len(problems) == 4


def test_a_base_in_one_file_is_that_file_and_the_embedded_one_is_pinned(tmp_path, monkeypatch):
    from ar2diff.pipelines import stages
    from ar2diff.sources.spec import EMBEDDED_BASE, EMBEDDED_NAME

    asked = []

    def fetch_nothing(spec, folder, **options):
        asked.append(spec)
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "model.gguf").write_bytes(b"GGUF")

    monkeypatch.setattr(stages, "fetch", fetch_nothing)
    context = RunContext(
        run_dir=tmp_path, cache_dir=tmp_path, library_dir=tmp_path, ledger=None, clock=SystemClock(), view=Watcher()
    )
    base = stages.fetch_base(stages.BaseConfig(source=EMBEDDED_NAME), context)
    assert (asked, base) == ([EMBEDDED_BASE], tmp_path / "base" / "inner" / "model.gguf")
    (tmp_path / "base" / "config.json").write_text("{}")
    monkeypatch.setattr(stages, "fetch", lambda *_, **__: None)
    assert stages.fetch_base(stages.BaseConfig(source=EMBEDDED_NAME), context) == tmp_path / "base"
