"""Claims about `prepare`: a whole folder or none, every row accounted for, the same bytes anywhere."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ar2diff.data import parts
from ar2diff.data.config import (
    EMBEDDED_MIXTURE,
    DataConfig,
    EvaluationShare,
    SourceShare,
    parse_evaluation_share,
    parse_source_share,
)
from ar2diff.data.documents import Document
from ar2diff.data.pipeline import prepare
from ar2diff.data.shards import TokenShard
from ar2diff.errors import ConfigError, DataError
from ar2diff.hashing import sha256_file
from ar2diff.provenance.ledger import Ledger, find_events
from ar2diff.tasks import structured


class FixedClock:
    def utc(self):
        return datetime(2030, 1, 1, tzinfo=UTC)

    def seconds(self):
        return 0.0


SMALL = DataConfig(
    sources=(SourceShare(source="procedural:structured", count=40),),
    evaluation=(EvaluationShare(task="structured", count=20),),
    max_document_len=800,
)


def run(config, tokenizer, out, **options):
    return prepare(config, tokenizer, out, **({"ledger": None, "progress": None} | options))


def local(path, **settings):
    return DataConfig(sources=(SourceShare(source=f"local:{path}", **settings),), max_document_len=800)


def test_the_shard_holds_what_the_receipt_says(tmp_path, byte_tokenizer):
    receipt = run(SMALL, byte_tokenizer, tmp_path / "data")
    shard = TokenShard(tmp_path / "data")
    shard.verify()
    assert shard.receipt == receipt.content
    assert (
        (len(shard), len(shard.token_ids))
        == (receipt.num_documents, receipt.num_tokens)
        == (40, len(shard.token_ids))
    )
    assert receipt.content["decontamination"]["num_items"] == 20
    assert receipt.content["decontamination"]["policies"] == ["sft-strict-v1", "procedural-v1", "hashed-v1"]
    first = structured.build_problems(split="train", count=1)[0]
    tokens = shard.token_ids[: shard.document_offsets[1]].tolist()
    assert byte_tokenizer.decode(tokens[shard.prompt_lens[0] :]) == first.reference


SCRIPT = """
import sys
from datetime import UTC, datetime
from pathlib import Path
sys.path[:0] = [{tests!r}]
from conftest import build_byte_tokenizer
from test_prepare import SMALL, run
run(SMALL, build_byte_tokenizer(), Path({out!r}))
assert "torch" not in sys.modules, "torch was loaded"
"""


def test_another_process_writes_the_same_bytes(tmp_path, byte_tokenizer):
    run(SMALL, byte_tokenizer, tmp_path / "here")
    script = SCRIPT.format(tests=str(Path(__file__).parent), out=str(tmp_path / "there"))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    digests = [{path.name: sha256_file(path) for path in (tmp_path / name).iterdir()} for name in ("here", "there")]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 7


def test_a_planted_evaluation_problem_is_removed_and_the_next_one_takes_its_place(
    tmp_path, byte_tokenizer, monkeypatch
):
    held_out = structured.build_problems(split="eval", count=3)[2]
    real = parts.generate_documents

    def with_planted(task_name, source, start):
        fields = {"prompt": held_out.messages, "response": held_out.reference, "passage": held_out.passage}
        if start == 0:
            yield Document(id="planted", source="s", task="structured", **fields)
        yield from real(task_name, source, start)

    monkeypatch.setattr(parts, "generate_documents", with_planted)
    receipt = run(SMALL, byte_tokenizer, tmp_path / "data")
    assert receipt.num_documents == 40
    assert receipt.content["sources"][0]["dropped"]["evaluation item"] >= 1
    removed = [json.loads(line) for line in (tmp_path / "data" / "removed.jsonl").read_text().splitlines()]
    planted = next(entry for entry in removed if entry["id"] == "planted")
    assert planted["item"] == held_out.id
    assert (planted["policy"], planted["rule"], planted["reason"]) == (
        "procedural-v1",
        "same-passage",
        "evaluation item",
    )
    assert planted["gram"]
    counted = receipt.content["decontamination"]["removed"]
    assert {"benchmark": "structured", "policy": "procedural-v1", "rule": "same-passage", "rows": 1} in counted
    assert "planted" not in (tmp_path / "data" / "ids.jsonl").read_text()


def test_every_row_is_a_document_or_has_a_reason(tmp_path, byte_tokenizer, write_jsonl):
    question = "Which of the seven bridges over the river Pregel did Euler cross on that day?"
    rows = [
        {"prompt": "What is blue?", "response": "The sky."},
        {"prompt": "what is  BLUE", "response": "The sea."},
        {"prompt": "Empty?", "response": " "},
        {"prompt": "Long?", "response": "x" * 900},
        {"prompt": question + " Tell me.", "response": "None."},
    ]
    block = write_jsonl("block.jsonl", [{"question": question, "answer": "0"}])
    config = DataConfig(
        sources=(SourceShare(source=f"local:{write_jsonl('chat.jsonl', rows)}"),),
        blocklist_files=(str(block),),
        max_document_len=800,
    )
    receipt = run(config, byte_tokenizer, tmp_path / "data")
    (source,) = receipt.content["sources"]
    assert source["dropped"] == {
        "empty response": 1,
        "evaluation item": 1,
        "longer than max_document_len": 1,
        "repeated prompt": 1,
    }
    assert (source["rows"], source["documents"], source["recipe"]) == (5, 1, "chat_jsonl")
    assert source["files"][0]["path"] == "chat.jsonl"
    removed = [json.loads(line) for line in (tmp_path / "data" / "removed.jsonl").read_text().splitlines()]
    assert len(removed) + receipt.num_documents == source["rows"]
    assert [entry.get("earlier") for entry in removed if entry["reason"] == "repeated prompt"] == ["row-1"]


def test_a_broken_file_leaves_no_folder(tmp_path, byte_tokenizer, write_jsonl):
    path = write_jsonl("chat.jsonl", [{"prompt": "a", "response": "b"}, {"text": "c"}])
    with pytest.raises(DataError, match=r"chat\.jsonl, row 2"):
        run(local(path), byte_tokenizer, tmp_path / "data")
    assert [entry.name for entry in tmp_path.iterdir()] == ["chat.jsonl"]


def test_nothing_left_to_train_on_is_an_error(tmp_path, byte_tokenizer, write_jsonl):
    with pytest.raises(DataError, match="no document is left"):
        run(local(write_jsonl("a.jsonl", [{"prompt": "a", "response": ""}])), byte_tokenizer, tmp_path / "data")


def test_the_ledger_has_the_receipt_once_however_often_it_runs(tmp_path, byte_tokenizer):
    with Ledger.open(tmp_path, clock=FixedClock(), run_id="r") as ledger:
        first = run(SMALL, byte_tokenizer, tmp_path / "data", ledger=ledger)
        times = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir()}
        assert run(SMALL, byte_tokenizer, tmp_path / "data", ledger=ledger) == first
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir()}
    (event,) = find_events(ledger.path, "prepare")
    assert event.data == first.content
    assert event.data["digest"] == first.digest


def test_a_folder_of_another_config_or_with_other_files_is_left_alone(tmp_path, byte_tokenizer):
    run(SMALL, byte_tokenizer, tmp_path / "data")
    other = DataConfig(sources=SMALL.sources, max_document_len=700)
    with pytest.raises(DataError, match="another config or tokenizer"):
        run(other, byte_tokenizer, tmp_path / "data")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match="something else"):
        run(SMALL, byte_tokenizer, tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    assert run(SMALL, byte_tokenizer, tmp_path / "empty").num_documents == 40


def test_progress_ends_at_the_wanted_number(tmp_path, byte_tokenizer):
    calls = []
    run(SMALL, byte_tokenizer, tmp_path / "a", progress=lambda *call: calls.append(call))
    assert calls[-1] == ("procedural:structured", 40, 40)
    bigger = DataConfig(sources=(SourceShare(source="procedural:structured", count=70),), max_document_len=800)
    run(bigger, byte_tokenizer, tmp_path / "b", progress=lambda *call: calls.append(call))
    assert ("procedural:structured", 64, 70) in calls


def test_a_generator_without_usable_documents_ends_with_an_error(tmp_path, byte_tokenizer):
    config = DataConfig(sources=(SourceShare(source="procedural:structured", count=1),), max_document_len=20)
    with pytest.raises(DataError, match="no more new documents"):
        run(config, byte_tokenizer, tmp_path / "data")


def test_folders_hashes_and_fetched_sources_are_found(tmp_path, byte_tokenizer, write_jsonl):
    (tmp_path / "in").mkdir()
    paths = [write_jsonl(f"in/{name}.jsonl", [{"prompt": name, "response": "b"}]) for name in ("b", "a")]
    assert run(local(tmp_path / "in"), byte_tokenizer, tmp_path / "o1").num_documents == 2
    sources = [json.loads(line)["source"] for line in (tmp_path / "o1" / "ids.jsonl").read_text().splitlines()]
    assert [source.rpartition("/")[2] for source in sources] == ["a.jsonl#1", "b.jsonl#1"]
    pinned = local(f"{paths[0]}#sha256={sha256_file(paths[0])}")
    assert run(pinned, byte_tokenizer, tmp_path / "o2").num_documents == 1
    with pytest.raises(DataError, match="SHA-256 is not the one given"):
        run(local(f"{paths[0]}#sha256={'0' * 64}"), byte_tokenizer, tmp_path / "o3")
    hub = DataConfig(sources=(SourceShare(source="hub:datasets/a/b@" + "0" * 40),))
    with pytest.raises(DataError, match="was not fetched"):
        run(hub, byte_tokenizer, tmp_path / "o4")
    fetched = {hub.sources[0].source: tmp_path / "in"}
    assert run(hub, byte_tokenizer, tmp_path / "o5", fetched=fetched).num_documents == 2
    with pytest.raises(DataError, match="no data files"):
        run(local(tmp_path / "nowhere"), byte_tokenizer, tmp_path / "o6")


def test_an_unknown_recipe_or_task_is_refused(tmp_path, byte_tokenizer, write_jsonl):
    path = write_jsonl("a.jsonl", [{"prompt": "a", "response": "b"}])
    with pytest.raises(ConfigError, match="chat_jsonl, openr1_math, taco, medmcqa"):
        run(local(path, recipe="nothing"), byte_tokenizer, tmp_path / "data")
    with pytest.raises(ConfigError, match="unknown task"):
        run(DataConfig(sources=(SourceShare(source="procedural:x", count=1),)), byte_tokenizer, tmp_path / "data")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DataConfig(sources=()), "no sources"),
        (lambda: DataConfig(sources=SMALL.sources * 2), "named twice"),
        (lambda: DataConfig(sources=SMALL.sources, max_document_len=1), "max_document_len"),
        (lambda: SourceShare(source="chat.jsonl"), "not a source"),
        (lambda: SourceShare(source="local:a", count=0), "count"),
        (lambda: SourceShare(source="procedural:structured"), "has no end"),
        (lambda: SourceShare(source="local:a", start=-1), "start"),
        (lambda: EvaluationShare(task="structured", count=0), "range is empty"),
        (lambda: parse_source_share("local:a?size=3"), "unknown setting"),
        (lambda: parse_source_share("local:a?count=many"), "not a whole number"),
        (lambda: parse_source_share("local:a?count=1&count=2"), "given twice"),
        (lambda: parse_evaluation_share("structured?count=-1"), "not a whole number"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(build, words):
    with pytest.raises(ConfigError, match=words):
        build()


def test_shares_are_written_as_one_line_each():
    share = SourceShare(source="hub:a/b@c", count=5, recipe="taco")
    assert parse_source_share("hub:a/b@c?count=5&recipe=taco") == share
    assert parse_source_share("procedural:structured?count=3&start=9").start == 9
    assert parse_source_share("local:a.jsonl") == SourceShare(source="local:a.jsonl")
    assert parse_evaluation_share("structured") == EvaluationShare(task="structured", count=200)
    assert parse_evaluation_share("x?count=7&start=2") == EvaluationShare(task="x", count=7, start=2)


def test_the_embedded_mixture_needs_no_files():
    assert all(share.is_procedural for share in EMBEDDED_MIXTURE.sources)
    assert {share.task for share in EMBEDDED_MIXTURE.evaluation} == {"structured", "reasoning"}
