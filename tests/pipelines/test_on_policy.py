"""Training on the model's own states: masks are what passes saw, losses fall, rounds resume, the audit passes."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ar2diff.audit.verify import audit_run
from ar2diff.clock import SystemClock
from ar2diff.data.stream import RowStream
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.errors import CheckpointError, ConfigError, DataError
from ar2diff.models.adapters import AdapterConfig
from ar2diff.models.loading import load_model
from ar2diff.pipelines.on_policy import build_round_config, read_reveals
from ar2diff.pipelines.recipe import OnPolicyConfig, parse_recipe
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.testing.models import tiny_diffusion, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.config import TrainConfig
from ar2diff.train.metrics import read_metrics
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.traces import NEVER, Traces, draw_states

RECIPE = {
    "base": {"source": "hub:tiny/parent@{model}"},
    "data": {
        "max_document_len": 480,
        "sources": [
            {"source": "procedural:structured", "count": 8, "start": 20},
            {"source": "parent:procedural:structured", "count": 4, "temperature": 2.0, "max_tokens": 120},
        ],
        "evaluation": [{"task": "structured", "count": 4}],
    },
    "train": {"steps": 2, "micro": 1, "row_len": 512, "save_every": 1, "objective": {"block_sizes": [4]}},
    "on_policy": {"rounds": 2, "prompts": 3, "steps": 12, "max_tokens": 10, "lr": 1e-3, "policy": "top_k"},
}


@pytest.fixture(scope="module")
def recipe(tiny_hub):
    content = json.loads(json.dumps(RECIPE).replace("{model}", tiny_hub.model))
    return parse_recipe(content)


@pytest.fixture(scope="module")
def finished(recipe, execute, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    return run_dir, execute(recipe, run_dir)


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "run")


def rounds_of(run_dir):
    return [event.data for event in find_events(run_dir / LEDGER_NAME, "on_policy_round")]


def cut_before(run_dir, event_type, *, number):
    """The run as it was before an event of its ledger."""
    lines = (run_dir / LEDGER_NAME).read_bytes().splitlines(keepends=True)
    places = [idx for idx, line in enumerate(lines) if json.loads(line)["type"] == event_type]
    (run_dir / LEDGER_NAME).write_bytes(b"".join(lines[: places[number]]))


def test_the_loss_on_the_models_own_states_falls_and_the_last_round_is_the_result(finished):
    run_dir, result = finished
    rounds = rounds_of(run_dir)
    assert [data["round"] for data in rounds] == [0, 1]
    assert result.checkpoint == run_dir / rounds[1]["checkpoint"]
    assert load_model(result.checkpoint).tensor_root == rounds[1]["tensor_root"]
    for number in (0, 1):
        metrics = read_metrics(run_dir / "on_policy" / f"round-{number:02d}" / "train")
        losses = [line["distill_loss"] for line in metrics]
        assert len(losses) == 12
        assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])


def test_each_round_begins_with_the_model_of_the_one_before_and_other_prompts(finished):
    run_dir = finished[0]
    rounds = rounds_of(run_dir)
    converted = find_events(run_dir / LEDGER_NAME, "conversion_finished")[0].data["tensor_root"]
    roots = [data["student_tensor_root"] for data in rounds]
    assert roots == [converted, rounds[0]["tensor_root"]]
    listed = [(run_dir / "on_policy" / f"round-{n:02d}" / "states" / "ids.jsonl").read_text() for n in (0, 1)]
    assert listed[0].replace('"0-', '"1-') != listed[1]


def test_a_round_that_was_cut_is_done_again_with_the_same_result(finished, copied, recipe, execute):
    cut_before(copied, "on_policy_round", number=1)
    states = copied / "on_policy" / "round-01" / "states"
    kept = (states / "token_ids.npy").stat().st_mtime_ns
    execute(recipe, copied)
    assert (states / "token_ids.npy").stat().st_mtime_ns == kept
    assert rounds_of(copied)[1]["tensor_root"] == rounds_of(finished[0])[1]["tensor_root"]
    shutil.rmtree(copied / "on_policy" / "round-01")
    cut_before(copied, "on_policy_round", number=1)
    execute(recipe, copied)
    again, first = rounds_of(copied)[1], rounds_of(finished[0])[1]
    again.pop("metrics_sha256"), first.pop("metrics_sha256")  # holds times
    assert again == first


def test_finished_rounds_are_kept_and_a_damaged_one_is_named(copied, recipe, execute):
    before = rounds_of(copied)
    assert execute(recipe, copied).checkpoint == copied / before[1]["checkpoint"]
    assert rounds_of(copied) == before
    path = copied / before[1]["checkpoint"] / "config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(CheckpointError):
        execute(recipe, copied)


def test_a_run_with_answers_and_rounds_passes_its_audit(finished):
    report = audit_run(finished[0], only=("A1", "A2", "A5", "A6", "A8", "A9", "A11"))
    assert {claim.id: claim.verdict for claim in report.claims if claim.verdict != "pass"} == {}


@pytest.mark.parametrize(
    ("path", "old", "new", "claim"),
    [
        ("answers/0/answers-000000.jsonl", b'"stop"', b'"stoq"', "A5"),
        ("answers/0/receipt.json", b'"temperature": 2.0', b'"temperature": 1.0', "A5"),
        ("on_policy/round-00/train/metrics.jsonl", b'"step": 1,', b'"step": 3,', "A11"),
        ("on_policy/round-01/states/ids.jsonl", b'"1-', b'"2-', "A11"),
    ],
)
def test_changed_answers_and_states_are_found(copied, path, old, new, claim):
    content = (copied / path).read_bytes()
    assert old in content
    (copied / path).write_bytes(content.replace(old, new, 1))
    assert {claim.verdict for claim in audit_run(copied, only=(claim,)).claims} == {"fail"}


def decode(**request):
    """An engine's answer and its traces."""
    loaded = tiny_model(3, diffusion=tiny_diffusion(), max_seq_len=256)
    engine = Engine(loaded, clock=SystemClock())
    settings = {"policy": "top_k", "trace": True, "max_tokens": 10, **request}
    return engine.generate(Request(prompt_ids=(65, 66, 67), **settings))


def test_the_states_are_those_that_the_passes_saw():
    generation = decode()
    reveals_NS = read_reveals(generation, num_tokens=10, block_size=4)
    assert reveals_NS.shape == (3, 4)
    for before, step in zip(generation.passes, generation.passes[1:], strict=False):
        if before.block_idx != step.block_idx:
            continue
        seen = [token is None for token in before.token_ids]
        assert (reveals_NS[step.block_idx] >= step.pass_idx).tolist() == seen


def test_drawn_states_are_distinct_and_only_as_many_as_there_were():
    reveals = np.array([[0, 1, 2, 3], [0, 1, 1, 1], [0, NEVER, NEVER, NEVER]], dtype=np.int16)
    supervised = np.array([[False, True, True, True], [False, True, True, True], [False, False, False, False]])
    noise = draw_states(reveals, supervised, np.array([[0.0, 0.0], [0.99, 0.0], [0.5, 0.5]]))
    assert noise.masked_NKS[0].tolist() == [[False, True, True, True], [False, False, True, True]]
    assert noise.kept_NK.tolist() == [[True, True], [True, False], [False, False]]
    last = draw_states(reveals, supervised, np.full((3, 2), 0.99))
    assert last.masked_NKS[0].tolist() == [[False, False, False, True], [False, False, True, True]]


def test_traces_of_another_shard_or_no_traces_are_refused(tmp_path):
    stream = RowStream(write_tiny_shard(tmp_path / "data"), row_len=64, seed=0)
    path = tmp_path / "reveals.npy"
    np.save(path, np.zeros((3, 4), dtype=np.int16))
    with pytest.raises(DataError, match="another shard"):
        Traces(path, stream)
    np.save(path, np.zeros((3, 4)))
    with pytest.raises(DataError, match="wrong type"):
        Traces(path, stream)
    path.write_bytes(b"no array")
    with pytest.raises(DataError, match="cannot be read"):
        Traces(path, stream)


def test_traces_follow_their_documents_into_the_rows_and_repeat_with_their_key(tmp_path):
    stream = RowStream(write_tiny_shard(tmp_path / "data", num_documents=9), row_len=64, seed=0)
    blocks = -(-stream.response_lens // 4)
    # Every block of a document is revealed in a pass named after the document.
    marks = np.repeat(np.arange(9, dtype=np.int16), blocks)
    np.save(tmp_path / "reveals.npy", np.repeat(marks[:, None], 4, axis=1))
    traces = Traces(tmp_path / "reveals.npy", stream)
    for row_id in range(stream.num_rows):
        documents = stream.documents_of(row_id)
        supervised = np.ones((int(blocks[documents].sum()), 4), dtype=np.bool_)
        noise = traces.at(num_views=2, seed=1, step=0)(supervised, row_id)
        again = traces.at(num_views=2, seed=1, step=0)(supervised, row_id)
        assert noise.masked_NKS.tobytes() == again.masked_NKS.tobytes()
        assert noise.kept_NK.tolist() == [[True, False]] * len(supervised)
        assert noise.masked_NKS[:, 0].all()
    with pytest.raises(DataError, match="blocks of 4"):
        traces.at(num_views=2, seed=1, step=0)(supervised[:, :2], 0)


def test_a_round_trains_the_recipes_way_but_for_what_it_says():
    train = TrainConfig(
        minutes=3.0, micro=2, average_last=2, adapter=None, objective=ObjectiveConfig(block_sizes=(2, 4))
    )
    config = build_round_config(train, OnPolicyConfig(steps=7, lr=1e-5), 1, 4)
    assert (config.steps, config.minutes, config.micro, config.average_last) == (7, None, 2, 0)
    assert (config.objective.block_sizes, config.objective.distill_weight) == ((4,), 1.0)
    assert (config.objective.diffusion_weight, config.objective.ar_weight) == (0.0, 0.0)
    assert config.seed != build_round_config(train, OnPolicyConfig(steps=7, lr=1e-5), 2, 4).seed
    adapter = replace(train, adapter=AdapterConfig(rank=2), objective=replace(train.objective, ar_weight=0.0))
    assert build_round_config(adapter, OnPolicyConfig(), 0, 4).adapter == AdapterConfig(rank=2)


@pytest.mark.parametrize(
    "settings",
    [{"rounds": 0}, {"prompts": 0}, {"policy": "none"}, {"temperature": 3.0}, {"distill_weight": 0.0}, {"steps": 0}],
)
def test_rounds_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError):
        OnPolicyConfig(**settings)
