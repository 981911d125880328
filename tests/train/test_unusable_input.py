"""What a run cannot be made of: data that teaches nothing, a foreign teacher, a damaged run folder."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ar2diff.clock import SystemClock
from ar2diff.data.shards import ShardWriter
from ar2diff.errors import DataError, ModelError, RunError
from ar2diff.hashing import sha256_file
from ar2diff.models.loading import save_model
from ar2diff.testing.models import END_ID, MASK_ID, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.checkpoint import checkpoint_dir, list_checkpoints
from ar2diff.train.config import TrainConfig
from ar2diff.train.metrics import read_metrics
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.trainer import train

CONFIG = TrainConfig(objective=ObjectiveConfig(block_sizes=(2, 4)), steps=2, micro=2, row_len=64, save_every=1)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_model(folder / "base", tiny_model(0), None)
    write_tiny_shard(folder / "data")
    return folder


def run(places, out, config=CONFIG, **options):
    return train(config, places / "base", places / "data", out, clock=SystemClock(), **options)


@pytest.mark.parametrize("damage", ["garbage\n", "[]\n", '{"step": "two"}\n'])
def test_damaged_metrics_are_an_error_that_names_the_line_and_costs_nothing(places, tmp_path, damage):
    run(places, tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write(damage)
    with pytest.raises(RunError, match="line 3 is no step"):
        run(places, tmp_path, init=checkpoint_dir(tmp_path, 1))
    assert len(list_checkpoints(tmp_path)) == 2


def test_a_run_file_that_is_no_object_is_an_error(places, tmp_path):
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(RunError, match=r"run\.json is no object"):
        run(places, tmp_path)


def shard_of(folder, *documents):
    with ShardWriter(folder) as writer:
        for idx, (ids, prompt_len) in enumerate(documents):
            writer.add_tokens(str(idx), f"made#{idx}", np.array(ids, dtype=np.uint32), prompt_len)
        writer.finish({"eos_token_id": END_ID, "files": writer.finish_arrays()})
    return folder


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (([65, 300, END_ID], 1), "token 300, and the model has 260 rows"),
        (([65, 2**32 - 1, END_ID], 1), "token 4294967295"),
        (([65, MASK_ID, END_ID], 1), f"token {MASK_ID}, which stands for a masked one"),
        (([65] * 299 + [END_ID], 1), "300 tokens, context 256"),
        (([END_ID], 0), "no document has a token to learn"),
    ],
)
def test_data_that_the_model_cannot_learn_from_makes_no_run(places, tmp_path, document, said):
    data = shard_of(tmp_path / "data", document)
    with pytest.raises(DataError, match=said):
        train(replace(CONFIG, row_len=320), places / "base", data, tmp_path / "out", clock=SystemClock())
    assert not (tmp_path / "out").exists()


def test_one_token_answers_teach_the_clean_stream_alone(places, tmp_path):
    data = shard_of(tmp_path / "data", ([65, END_ID], 1))
    config = replace(CONFIG, steps=1)
    train(config, places / "base", data, tmp_path / "out", clock=SystemClock())
    (line,) = read_metrics(tmp_path / "out")
    assert (line["diffusion_loss"], line["ar_loss"] > 0) == (None, True)
    config = replace(config, objective=replace(config.objective, ar_weight=0.0))
    with pytest.raises(DataError, match="no document has a token to learn"):
        train(config, places / "base", data, tmp_path / "other", clock=SystemClock())


def test_one_token_answers_are_predicted_where_blocks_begin_with_the_last_token(places, tmp_path):
    objective = replace(CONFIG.objective, block_sizes=(4,), ar_weight=0.0, anchor="last")
    config = replace(CONFIG, steps=1, objective=objective)
    for name, document in (("answer", ([65, END_ID], 1)), ("alone", ([END_ID], 0))):
        data = shard_of(tmp_path / f"{name}-data", document)
        if name == "alone":
            with pytest.raises(DataError, match="no document has a token to learn"):
                train(config, places / "base", data, tmp_path / name, clock=SystemClock())
        else:
            train(config, places / "base", data, tmp_path / name, clock=SystemClock())
            assert read_metrics(tmp_path / name)[0]["diffusion_loss"] > 0


def test_a_teacher_of_other_logits_is_refused(places, tmp_path):
    config = json.loads((places / "base" / "config.json").read_text())
    shutil.copytree(places / "base", tmp_path / "teacher")
    scaled = {**config, "model_type": "granite", "logits_scaling": 2.0}
    scaled |= {"attention_multiplier": 1.0, "residual_multiplier": 1.0, "embedding_multiplier": 1.0}
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(scaled))
    distilled = replace(CONFIG, objective=replace(CONFIG.objective, distill_weight=1.0))
    with pytest.raises(ModelError, match="teacher"):
        run(places, tmp_path / "out", distilled, teacher=tmp_path / "teacher")


@pytest.mark.parametrize(
    ("receipt", "said"),
    [
        ([], "names no files"),
        ({"eos_token_id": END_ID}, "names no files"),
        ({"files": {}}, "names no end token"),
        ({"eos_token_id": None, "files": {}}, "names no end token"),
    ],
)
def test_a_receipt_without_its_parts_is_an_error(places, tmp_path, receipt, said):
    data = write_tiny_shard(tmp_path / "data")
    (data / "receipt.json").write_text(json.dumps(receipt))
    (data / "COMPLETE").write_text(sha256_file(data / "receipt.json"))
    with pytest.raises(DataError, match=said):
        train(CONFIG, places / "base", data, tmp_path / "out", clock=SystemClock())
