"""Claims about stored benchmarks as blocklists: their rows are found, and some leave nothing but hashes."""

import json

import pytest

from ar2diff.cli import run
from ar2diff.cli.data import write_item_hashes
from ar2diff.data.blocklist import BlocklistItem
from ar2diff.data.config import DataConfig, EvaluationShare, SourceShare, parse_evaluation_share
from ar2diff.data.decontaminate import Decontaminator
from ar2diff.data.documents import Document
from ar2diff.data.evaluation_items import build_blocklist, load_problems
from ar2diff.data.hashed_items import HASHED_POLICY, build_hashed_item, read_hashes, write_hashes
from ar2diff.data.pipeline import prepare
from ar2diff.data.rows import MAX_ROW_BYTES
from ar2diff.errors import ConfigError, DataError

QUESTION = "A quark of mass 12 moves past seven idle gluons near the old detector; which symmetry is broken first?"
OTHER = "Which of the tired enzymes folds 3 sheets of tungsten before the second reaction has begun in the flask?"


def gpqa_row(question):
    wrong = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
    return {"Question": question, "Correct Answer": "right", "Record ID": question[:9], **wrong}


def hashed(question, **fields):
    return BlocklistItem(id="q1", benchmark="gpqa_diamond", prompt=question, is_math=True, hash_only=True, **fields)


def document(prompt, response="fine"):
    return Document(id="d", prompt=({"role": "user", "content": prompt},), response=response, source="s")


@pytest.mark.parametrize("place", ["prompt", "response"])
@pytest.mark.parametrize(
    ("copy", "rule"),
    [
        (QUESTION, "8-gram"),
        (QUESTION.upper().replace(" ", "  "), "8-gram"),
        (QUESTION.replace("12", "345").replace("seven", "nine"), "8-gram"),
        ("mass 99 moves past seven idle gluons near", "8-gram-numbers-masked"),
    ],
)
def test_hashes_find_what_the_text_would(place, copy, rule):
    planted = document(copy) if place == "prompt" else document("Anything?", f"so {copy} it")
    match = Decontaminator([hashed(QUESTION)]).find(planted)
    assert (match.item_id, match.policy, match.rule) == ("q1", HASHED_POLICY, rule)
    assert match.gram.startswith("blake2b:")
    assert Decontaminator([hashed(QUESTION)]).find(document(OTHER)) is None


def test_a_short_hashed_item_is_found_whole():
    match = Decontaminator([hashed("Name the seventh lepton!")]).find(document("so name the seventh lepton now"))
    assert match.rule == "short-item"


def test_a_file_of_hashes_blocks_like_the_items_and_holds_no_words(tmp_path):
    item = build_hashed_item(hashed(QUESTION))
    path = tmp_path / "gpqa.hashes.json"
    write_hashes(path, [item])
    assert read_hashes(path) == [item]
    content = path.read_text().lower()
    assert not any(word.lower() in content for word in QUESTION.split() if len(word) > 4)
    assert list(item.plain) == sorted(item.plain)
    assert Decontaminator([], hashed=read_hashes(path)).find(document(QUESTION)).item_id == "q1"
    path.write_text('{"format": "x"}')
    with pytest.raises(DataError, match="not a file of item hashes"):
        read_hashes(path)


@pytest.mark.parametrize("task", ["gpqa_diamond", None])
def test_the_command_writes_hashes_that_prepare_takes_as_a_blocklist(tmp_path, write_jsonl, capsys, task):
    row = gpqa_row(QUESTION) if task else {"prompt": QUESTION, "response": "right"}
    path = write_jsonl("items.jsonl", [row])
    options = ["--task", task] if task else []
    assert run(["data", "hash-items", str(path), *options]) == 0
    target = tmp_path / "items.hashes.json"
    assert capsys.readouterr().out.split() == [str(target)]
    assert "gluons" not in target.read_text()
    config = DataConfig(sources=(SourceShare(source=f"local:{path}"),), blocklist_files=(str(target),))
    match = build_blocklist(config, []).find(document(QUESTION.upper()))
    assert (match.benchmark, match.policy) == (task or "items.jsonl", HASHED_POLICY)


def test_a_hash_file_has_the_name_that_prepare_knows(tmp_path, write_jsonl):
    path = write_jsonl("items.jsonl", [{"prompt": QUESTION, "response": "right"}])
    with pytest.raises(ConfigError, match=r"End it in \.hashes\.json"):
        write_item_hashes(path, None, tmp_path / "items.json")
    assert not (tmp_path / "items.json").exists()


def test_an_unpublished_question_appears_nowhere_in_the_data_folder(tmp_path, byte_tokenizer, write_jsonl):
    rows = [{"prompt": QUESTION, "response": "a"}, {"prompt": "What is blue?", "response": "The sky."}]
    chat = write_jsonl("chat.jsonl", rows)
    gpqa = write_jsonl("gpqa.jsonl", [gpqa_row(OTHER), gpqa_row(QUESTION)])
    config = DataConfig(
        sources=(SourceShare(source=f"local:{chat}"),),
        evaluation=(parse_evaluation_share(f"gpqa_diamond?source=local:{gpqa}"),),
        max_document_len=900,
    )
    receipt = prepare(config, byte_tokenizer, tmp_path / "data", ledger=None, progress=None)
    assert receipt.num_documents == 1
    assert receipt.content["decontamination"]["removed"] == [
        {"benchmark": "gpqa_diamond", "policy": HASHED_POLICY, "rule": "8-gram", "rows": 1}
    ]
    assert receipt.content["decontamination"]["evaluation"][0]["items"] == 2
    for path in (tmp_path / "data").iterdir():
        assert b"gluons" not in path.read_bytes().lower()
        assert b"tungsten" not in path.read_bytes().lower()


def test_other_stored_benchmarks_keep_both_texts_for_the_record(tmp_path, byte_tokenizer, write_jsonl):
    chat = write_jsonl("chat.jsonl", [{"prompt": QUESTION, "response": "a"}, {"prompt": "b", "response": "c"}])
    gsm8k = write_jsonl("gsm8k.jsonl", [{"question": QUESTION, "answer": "#### 2"}])
    share = EvaluationShare(task="gsm8k", count=5, source=f"local:{gsm8k}")
    config = DataConfig(sources=(SourceShare(source=f"local:{chat}"),), evaluation=(share,), max_document_len=900)
    prepare(config, byte_tokenizer, tmp_path / "data", ledger=None, progress=None)
    (removed,) = [json.loads(line) for line in (tmp_path / "data" / "removed.jsonl").read_text().splitlines()]
    assert removed["item"] == "gsm8k/test/1"
    assert (removed["item_text"], removed["text"]) == (QUESTION, f"{QUESTION}\na")


def test_problems_are_the_rows_asked_for(write_jsonl):
    path = write_jsonl("g.jsonl", [{"question": f"q{n}", "answer": f"#### {n}"} for n in range(9)])
    share = EvaluationShare(task="gsm8k", count=3, start=2, source=f"local:{path}")
    assert [problem.id for problem in load_problems(share, {})] == [f"gsm8k/test/{n}" for n in (3, 4, 5)]
    fetched = {"hub:a/b@c": path}
    share = EvaluationShare(task="gsm8k", count=30, source="hub:a/b@c")
    assert len(load_problems(share, fetched)) == 9


def test_a_source_and_its_task_must_fit(write_jsonl):
    path = write_jsonl("g.jsonl", [{"question": "q", "answer": "#### 1"}, {"question": "q", "answer": "none"}])
    with pytest.raises(DataError, match=r"g\.jsonl, row 2: not a row of gsm8k: the answer does not end"):
        load_problems(EvaluationShare(task="gsm8k", count=5, source=f"local:{path}"), {})
    with pytest.raises(DataError, match=r"row 1: not a row of math500: no column 'problem'"):
        load_problems(EvaluationShare(task="math500", count=5, source=f"local:{path}"), {})
    with pytest.raises(ConfigError, match="lie in a file"):
        load_problems(EvaluationShare(task="gsm8k", count=5), {})
    with pytest.raises(ConfigError, match="generates its problems"):
        load_problems(EvaluationShare(task="structured", count=5, source=f"local:{path}"), {})


def test_a_row_of_livecodebench_may_hold_more_private_tests_than_any_training_row(write_jsonl):
    row = {"question_id": "a", "question_content": QUESTION, "private_test_cases": "x" * (MAX_ROW_BYTES + 1)}
    path = write_jsonl("items.jsonl", [row])
    (problem,) = load_problems(parse_evaluation_share(f"livecodebench?source=local:{path}"), {})
    assert problem.passage == QUESTION


def options(names):
    return {name: f"option {name}" for name in names}


# Rows with the published columns, and where the question lies.
SETS = {
    "math500": ("problem", {"solution": "s", "answer": "1", "unique_id": "test/algebra/1.json", "level": 3}),
    "livecodebench": ("question_content", {"question_id": "a", "starter_code": "", "public_test_cases": "[]"}),
    "gpqa_diamond": ("Question", gpqa_row("")),
    "gsm8k": ("question", {"answer": "It is <<1000+234=1234>>1,234.\n#### 1,234"}),
    "humaneval": ("prompt", {"task_id": "H/1", "canonical_solution": "  pass", "test": "t", "entry_point": "f"}),
    "mbpp": ("text", {"task_id": 11, "code": "pass", "test_list": ["assert f()"]}),
    "medmcqa": ("question", {"id": "m", "cop": None, "exp": None, **options(("opa", "opb", "opc", "opd"))}),
}


@pytest.mark.parametrize("name", SETS)
def test_a_copy_of_a_question_of_every_set_is_removed(name, tmp_path, byte_tokenizer, write_jsonl):
    column, others = SETS[name]
    held_out = write_jsonl(f"{name}.jsonl", [others | {column: QUESTION}])
    chat = write_jsonl("chat.jsonl", [{"prompt": QUESTION, "response": "x"}, {"prompt": OTHER, "response": "y"}])
    config = DataConfig(
        sources=(SourceShare(source=f"local:{chat}"),),
        evaluation=(parse_evaluation_share(f"{name}?source=local:{held_out}"),),
    )
    receipt = prepare(config, byte_tokenizer, tmp_path / "data", ledger=None, progress=None)
    (source,) = receipt.content["sources"]
    assert source["dropped"] == {"evaluation item": 1}
    assert [entry["benchmark"] for entry in receipt.content["decontamination"]["removed"]] == [name]
