"""Answers of the parent: resumable with the same bytes, seeded, pinned by a receipt, cut answers dropped by name."""

import json
from dataclasses import replace

import pytest

from ar2diff.cli import run as run_command
from ar2diff.clock import SystemClock
from ar2diff.data.config import DataConfig, SourceShare, parse_source_share
from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.locate import locate_share
from ar2diff.data.pipeline import prepare
from ar2diff.data.recipes import parent as parent_recipe
from ar2diff.engine.engine import Engine
from ar2diff.engine.generation import Generation
from ar2diff.engine.request import Request
from ar2diff.errors import ConfigError, DataError, GenerationError, RequestError
from ar2diff.pipelines.parent_answers import ROWS_PER_FILE, EngineParent, answer_prompts, open_user_turn
from ar2diff.pipelines.stages import fetch_data
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, find_events
from ar2diff.testing.models import byte_tokenizer, nan_model, tiny_model
from ar2diff.tokenizer import Tokenizer

SHARE = SourceShare(source="parent:procedural:structured", count=70, temperature=1.0, max_tokens=8)


class Echo:
    """A parent that writes its request's seed; every third answer is cut. Counts what it is asked."""

    tokenizer = byte_tokenizer()
    max_seq_len = 4096

    def __init__(self, *, die_at=None):
        self.batches, self.die_at = [], die_at

    def describe(self):
        return {"tensor_root": "r" * 64, "precision": "none"}

    def answer(self, requests):
        if len(self.batches) == self.die_at:
            raise KeyboardInterrupt
        self.batches.append(list(requests))
        return [self.generate(request) for request in requests]

    def generate(self, request):
        text = f" says {request.seed}\u2028" if request.seed % 5 else " "
        reason = "length" if request.seed % 3 == 0 else "stop"
        return Generation(
            token_ids=(1, 2),
            text=text,
            finish_reason=reason,
            logprobs=(0.0, 0.0),
            num_forward_passes=2,
            num_prefill_passes=0,
            passes_per_block=(),
            drafted_by_offset=(),
            accepted_by_offset=(),
            prefill_s=0.0,
            decode_s=0.0,
        )


def answer(share, folder, parent=None, *, ledger=None, fetched=None):
    return answer_prompts(share, parent or Echo(), folder, fetched=fetched or {}, ledger=ledger)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rows_of(folder):
    files = sorted(folder.glob("answers-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().split("\n") if line]


def test_a_run_that_was_killed_goes_on_from_its_finished_files_with_the_same_bytes(tmp_path):
    answer(SHARE, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        answer(SHARE, tmp_path / "cut", Echo(die_at=2))
    assert not (tmp_path / "cut" / "receipt.json").exists()
    parent = Echo()
    answer(SHARE, tmp_path / "cut", parent)
    assert [len(batch) for batch in parent.batches] == [70 - 2 * ROWS_PER_FILE]
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_a_finished_folder_is_kept_and_one_that_was_changed_or_is_of_another_request_is_refused(tmp_path):
    first, parent = answer(SHARE, tmp_path / "a"), Echo()
    assert answer(SHARE, tmp_path / "a", parent) == first
    assert parent.batches == []
    for other in (replace(SHARE, temperature=0.5), replace(SHARE, seed=1), replace(SHARE, count=69)):
        with pytest.raises(DataError, match="another request"):
            answer(other, tmp_path / "a")
    path = tmp_path / "a" / "answers-000000.jsonl"
    path.write_text(path.read_text().replace("says", "sayz"))
    with pytest.raises(DataError, match="changed after"):
        answer(SHARE, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="something else"):
        answer(SHARE, tmp_path / "b")


def test_every_answer_has_a_seed_of_its_own_that_its_number_alone_decides(tmp_path):
    whole, later = Echo(), Echo()
    answer(SHARE, tmp_path / "a", whole)
    answer(replace(SHARE, start=30, count=10), tmp_path / "b", later)
    seeds = [request.seed for batch in whole.batches for request in batch]
    assert len(set(seeds)) == 70
    assert [request.seed for request in later.batches[0]] == seeds[30:40]
    assert [r["id"] for r in rows_of(tmp_path / "b")] == [r["id"] for r in rows_of(tmp_path / "a")][30:40]
    assert {request.mode for batch in whole.batches for request in batch} == {"ar"}


def test_the_receipt_names_model_prompts_and_sampling_and_is_logged_once(tmp_path):
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="a") as ledger:
        receipt = answer(SHARE, tmp_path / "answers", ledger=ledger)
        answer(SHARE, tmp_path / "answers", ledger=ledger)
    events = find_events(tmp_path / LEDGER_NAME, "parent_answers")
    assert [event.data for event in events] == [{**receipt, "folder": "answers"}]
    asked = receipt["request"]
    assert asked["model"] == {"tensor_root": "r" * 64, "precision": "none"}
    assert asked["source"] == "parent:procedural:structured"
    assert asked["prompts"]["task_version"]
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"], asked["seed"]) == (1.0, 1.0, 8, 0)
    assert receipt["rows"] == sum(receipt["finish_reasons"].values()) == 70
    assert receipt["finish_reasons"]["length"] > 0


def test_cut_and_empty_answers_are_dropped_by_name_and_the_rest_keep_prompt_and_task(tmp_path):
    answer(SHARE, tmp_path / "a")
    read = [
        row
        for path in sorted((tmp_path / "a").glob("*.jsonl"))
        for row in parent_recipe.read_documents(path, "parent:x")
    ]
    rows = rows_of(tmp_path / "a")
    assert len(read) == len(rows) == 70
    for document, row in zip(read, rows, strict=True):
        if row["finish_reason"] == "length":
            assert isinstance(document, DroppedRow)
            assert document.reason == "truncated answer"
        elif not row["response"].strip():
            assert document.reason == "empty response"
        else:
            assert isinstance(document, Document)
            assert (document.response, document.task) == (row["response"], "structured")
            assert [dict(turn) for turn in document.prompt] == row["prompt"]


def test_prepared_data_holds_the_answers_and_accounts_for_every_dropped_one(tmp_path):
    receipt = answer(SHARE, tmp_path / "answers")
    config = DataConfig(sources=(SHARE,), max_document_len=2000)
    fetched = {SHARE.source: tmp_path / "answers"}
    made = prepare(config, byte_tokenizer(), tmp_path / "data", ledger=None, progress=None, fetched=fetched)
    entry = made.content["sources"][0]
    assert entry["dropped"]["truncated answer"] == receipt["finish_reasons"]["length"]
    assert entry["documents"] + sum(entry["dropped"].values()) == entry["rows"] == 70
    assert (entry["recipe"], entry["files"]) == ("parent", receipt["files"])
    assert made.content["config"]["sources"][0]["temperature"] == 1.0


def test_data_of_other_settings_than_the_answers_have_is_not_made(tmp_path):
    answer(SHARE, tmp_path / "answers")
    fetched = {SHARE.source: tmp_path / "answers"}
    with pytest.raises(DataError, match="another temperature and seed"):
        locate_share(replace(SHARE, temperature=0.0, seed=3), fetched)
    with pytest.raises(DataError, match="no answers of a parent"):
        locate_share(SHARE, {})


def test_a_prompt_that_does_not_fit_the_parent_is_dropped_and_the_others_are_answered(tmp_path):
    rows = [{"prompt": "short", "response": "x"}, {"prompt": "long " * 100, "response": "x"}]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "", "response": "y"}]))
    parent = Echo()
    parent.max_seq_len = 200
    receipt = answer(SourceShare(source=f"parent:local:{path}"), tmp_path / "a", parent)
    assert [row["finish_reason"] for row in rows_of(tmp_path / "a")][1] == "prompt_refused"
    assert receipt["prompts_dropped"] == {"empty prompt": 1}
    assert len(parent.batches[0]) == 1


def test_an_engine_answers_a_request_the_same_way_every_time(tmp_path):
    loaded = tiny_model(1, max_seq_len=512)
    share = replace(SHARE, count=3, max_tokens=12)
    for name in ("a", "b"):
        answer(share, tmp_path / name, EngineParent(Engine(loaded, clock=SystemClock())))
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    receipt = json.loads((tmp_path / "a" / "receipt.json").read_text())
    assert receipt["request"]["model"]["tensor_root"] == loaded.tensor_root
    assert len({row["response"] for row in rows_of(tmp_path / "a")}) == 3


def test_answers_that_cannot_be_are_raised_and_a_request_that_cannot_be_served_costs_no_forward():
    engine = Engine(nan_model(diffusion=None), clock=SystemClock())
    parent, passes = EngineParent(engine), []
    engine.runner.register_forward_hook(lambda *_: passes.append(1))
    good = Request(prompt_ids=(65, 66), max_tokens=3, mode="ar")
    with pytest.raises(GenerationError):
        parent.answer([good, good])
    passes.clear()
    with pytest.raises(RequestError):
        parent.answer([good, replace(good, prompt_ids=(65, 10**6))])
    assert not passes


def test_a_parent_writes_its_own_prompts_from_an_opened_user_turn(tmp_path):
    parent = Echo()
    share = SourceShare(source="parent:self", count=40, max_tokens=8)
    receipt = answer(share, tmp_path / "a", parent)
    opened = parent.tokenizer.decode(parent.batches[0][0].prompt_ids, skip_special=False)
    assert opened == open_user_turn(parent.tokenizer) == "<|im_start|>user\n"
    assert {request.temperature for request in parent.batches[0]} == {1.0}
    assert len({request.seed for request in parent.batches[0]}) == ROWS_PER_FILE
    assert {request.temperature for request in parent.batches[1]} == {0.0}
    assert receipt["finish_reasons"]["prompt_length"] > 0
    row = next(row for row in rows_of(tmp_path / "a") if row["finish_reason"] == "stop")
    assert row["prompt"][0]["content"].startswith("says ")


def test_a_model_without_a_user_turn_is_told_to_take_a_source_of_prompts():
    plain = byte_tokenizer()
    template = "{{ messages[0]['content'] }}"
    bare = Tokenizer(plain._backend, eos_token_ids=[257], chat_template=template)
    with pytest.raises(RequestError, match="opens no user turn"):
        open_user_turn(bare)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: SourceShare(source="parent:procedural:structured"), "has no end"),
        (lambda: SourceShare(source="parent:self"), "has no end"),
        (lambda: SourceShare(source="parent:parent:local:x"), "answers prompts of a source"),
        (lambda: SourceShare(source="local:x", temperature=0.5), "for answers of the parent"),
        (lambda: SourceShare(source="parent:local:x", temperature=3.0), "temperature"),
        (lambda: SourceShare(source="parent:local:x", top_p=0.0), "top_p"),
        (lambda: SourceShare(source="parent:local:x", max_tokens=0), "max_tokens"),
        (lambda: parse_source_share("parent:local:x?temperature=warm"), "not a number"),
        (lambda: DataConfig(sources=(SHARE, replace(SHARE, start=200))), "named twice"),
    ],
)
def test_shares_that_make_no_sense_are_refused(make, problem):
    with pytest.raises(ConfigError, match=problem):
        make()


def test_settings_of_answers_can_be_written_into_a_source_text():
    text = "parent:self?count=5&temperature=0.7&top_p=0.9&max_tokens=64&seed=3"
    expected = SourceShare(source="parent:self", count=5, temperature=0.7, top_p=0.9, max_tokens=64, seed=3)
    assert parse_source_share(text) == expected


def test_records_of_other_sources_say_nothing_of_answers():
    assert "temperature" not in SourceShare(source="local:x").as_json()


def test_the_command_makes_a_folder_that_prepare_takes(tiny_parent, tmp_path, capsys):
    source = "parent:procedural:structured?count=8&temperature=2&max_tokens=200"
    words = [str(tiny_parent), "--source", source, "--out", str(tmp_path / "answers"), "--precision", "fp32"]
    assert run_command(["answers", *words]) == 0
    assert "8 answers in" in capsys.readouterr().err
    made = ["prepare", str(tmp_path / "data"), "--tokenizer", str(tiny_parent), "--source", source]
    assert run_command([*made, "--fetched", str(tmp_path / "answers"), "--max-document-len", "2000"]) == 0
    assert (tmp_path / "data" / "COMPLETE").is_file()
    assert run_command(["answers", str(tiny_parent), "--source", "procedural:structured?count=3"]) == 2
    assert "not answers of a parent" in capsys.readouterr().err


def test_prompts_that_the_parent_writes_need_no_file():
    share = SourceShare(source="parent:self", count=1)
    assert fetch_data(DataConfig(sources=(share,)), None) == {}
