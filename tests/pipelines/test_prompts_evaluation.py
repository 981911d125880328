"""Prompts without a right answer beside a graded benchmark: no accuracy for these, the other's as if alone."""

import json
import shutil

import pytest

from ar2diff.audit.verify import audit_run
from ar2diff.cli import run
from ar2diff.data.config import DataConfig, EvaluationShare, SourceShare
from ar2diff.data.evaluation_items import load_problems
from ar2diff.data.pipeline import prepare
from ar2diff.files import write_json, write_text
from ar2diff.hashing import sha256_file
from ar2diff.models.loading import save_model
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.testing.models import byte_tokenizer, tiny_diffusion, tiny_model

LONG = "\n\n".join(
    f"Paragraph {n}: the {word} boat carries grain across the narrow {word} strait before winter comes."
    for n, word in enumerate(("red", "old", "slow", "last"))
)
QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Tell of a boat.", "Again."]},
    {"question_id": 2, "category": "math", "turns": ["What is two and two?"]},
    {"question_id": 3, "category": "writing", "turns": [LONG]},
]
SUMS = [{"question": f"What is {n} plus one?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(3)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    return write_rows(folder / "questions.jsonl", QUESTIONS), write_rows(folder / "sums.jsonl", SUMS)


def evaluate(folder, out, *tasks):
    fixed = ["--modes", "ar,verified", "--max-tokens", "24", "--precision", "fp32"]
    line = ["evaluate", str(folder / "child"), "--base", str(folder / "parent"), "--out", str(out), *fixed]
    assert run([*line, *(word for task in tasks for word in ("--tasks", task))]) == 0
    save_model(out / "checkpoints" / "step-000001", tiny_model(2, max_seq_len=1024), tiny_diffusion())
    return json.loads((out / "eval.json").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "child", tiny_model(2, max_seq_len=1024), tiny_diffusion())
    save_model(folder / "parent", tiny_model(2, max_seq_len=1024), None)
    return folder


@pytest.fixture(scope="module")
def evaluated(models, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    return out, evaluate(models, out, f"prompts?source=local:{files[0]}", f"gsm8k?source=local:{files[1]}")


@pytest.fixture
def run_copy(evaluated, tmp_path):
    return shutil.copytree(evaluated[0], tmp_path / "run")


def test_a_domain_of_prompts_has_speed_and_acceptance_but_no_accuracy(evaluated):
    scores = {(score["mode"], score["domain"]): score for score in evaluated[1]["scores"]}
    writing = scores["verified", "writing"]
    assert (writing["accuracy"], writing["interval"], writing["num_scored"], writing["num_graded"]) == (
        None,
        None,
        0,
        0,
    )
    assert writing["num_problems"] == 2
    assert writing["tokens_per_s"] > 0
    assert writing["tokens_per_forward"] > 0
    samples = [json.loads(line) for line in (evaluated[0] / "eval_samples.jsonl").read_text().splitlines()]
    of_writing = [s for s in samples if s["mode"] == "verified" and s["domain"] == "writing"]
    assert {sample["correct"] for sample in of_writing} == {None}
    assert writing["num_drafts"] == sum(sample["drafted_by_offset"][0] for sample in of_writing) > 0
    assert writing["num_accepted"] == sum(sum(sample["accepted_by_offset"]) for sample in of_writing)
    # The category and the benchmark are both called math: its totals count the benchmark's problems alone.
    math, overall = scores["ar", "math"], scores["ar", "all"]
    assert (math["num_problems"], overall["num_problems"]) == (4, 6)
    assert math["num_scored"] == overall["num_scored"] == 3
    assert {(e["mode"], e["domain"]) for e in evaluated[1]["against_ar"]} == {
        ("verified", "math"),
        ("verified", "all"),
    }


def test_beside_prompts_a_benchmark_has_the_accuracy_that_it_has_alone(evaluated, models, files, tmp_path):
    alone = evaluate(models, tmp_path / "alone", f"gsm8k?source=local:{files[1]}")
    names = ("mode", "num_scored", "num_graded", "num_correct", "accuracy", "interval")
    for found in (evaluated[1], alone):
        assert [s["domain"] for s in found["scores"]].count("all") == 2
    together, apart = (
        [[score[name] for name in names] for score in found["scores"] if score["domain"] == "all"]
        for found in (evaluated[1], alone)
    )
    assert together == apart
    assert audit_run(tmp_path / "alone", only=("A17",)).find("A17").verdict == "pass"


def test_the_tables_show_no_accuracy_for_prompts(models, files, tmp_path, capsys):
    stored = evaluate(models, tmp_path / "run", f"prompts?source=local:{files[0]}")
    shown = capsys.readouterr().out
    assert "right" not in shown
    assert "Speed by domain" in shown
    assert all(shown.count(name) >= 1 for name in ("writing", "math", "accepted"))
    assert "%" not in shown.replace("100%", "")
    assert stored["bits_per_token"] == {}
    assert {score["accuracy"] for score in stored["scores"]} == {None}
    assert stored["against_ar"] == []
    assert run(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Speed by domain" in page
    assert "<td>writing</td>" in page
    assert "0/0" not in page
    assert "Accuracy against speed" not in page
    assert "may equal that of the AR mode" not in page
    assert audit_run(tmp_path / "run", only=("A17",)).find("A17").verdict == "pass"


def verdict(folder):
    return audit_run(folder, only=("A17",)).find("A17").verdict


def relog(folder):
    """The digests that the ledger names as they are now, so that only the content can give it away."""
    (event,) = find_events(folder / LEDGER_NAME, "evaluate")
    text = (folder / LEDGER_NAME).read_text()
    for logged in (event.data["report"], event.data["samples"]):
        text = text.replace(logged["sha256"], sha256_file(folder / logged["path"]))
    write_text(folder / LEDGER_NAME, text)


def test_the_audit_passes_and_a_changed_ledger_with_the_same_content_still_does(run_copy):
    assert verdict(run_copy) == "pass"
    relog(run_copy)
    assert verdict(run_copy) == "pass"


@pytest.mark.parametrize(
    "change",
    [
        {"correct": True},
        {"correct": False},
        {"text": "better"},
        {"domain": "poetry"},
        {"accepted_by_offset": [99]},
        {"drafted_by_offset": [99]},
        {"token_ids": [1, 2, 3]},
    ],
)
def test_a_changed_answer_to_a_prompt_is_found(run_copy, change):
    path = run_copy / "eval_samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(n for n, s in enumerate(samples) if s["mode"] == "verified" and s["domain"] == "writing")
    samples[place] |= change
    write_text(path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
    relog(run_copy)
    assert verdict(run_copy) == "fail"


@pytest.mark.parametrize("grade", [True, False])
def test_a_grade_where_nothing_is_right_or_wrong_is_found_as_such(run_copy, grade):
    path = run_copy / "eval_samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    next(sample for sample in samples if sample["domain"] == "writing")["correct"] = grade
    write_text(path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
    relog(run_copy)
    checks = audit_run(run_copy, only=("A17",)).find("A17").checks
    assert any("with another grade" in check.what and check.verdict == "fail" for check in checks)


@pytest.mark.parametrize("domain", ["writing", "all"])
@pytest.mark.parametrize(
    "change",
    [
        {"accuracy": 1.0},
        {"accuracy": 0.0, "interval": [0.0, 0.9]},
        {"num_scored": 1},
        {"num_graded": 7},
        {"num_accepted": 999},
    ],
)
def test_a_changed_figure_of_prompts_is_found(run_copy, domain, change):
    stored = json.loads((run_copy / "eval.json").read_text())
    score = next(s for s in stored["scores"] if (s["mode"], s["domain"]) == ("verified", domain))
    score |= change
    write_json(run_copy / "eval.json", stored)
    relog(run_copy)
    assert verdict(run_copy) == "fail"


def test_a_report_from_before_prompts_is_still_one(run_copy):
    stored = json.loads((run_copy / "eval.json").read_text())
    for score in stored["scores"]:
        for name in ("num_scored", "num_graded", "num_drafts", "num_accepted"):
            del score[name]
    write_json(run_copy / "eval.json", stored)
    relog(run_copy)
    assert verdict(run_copy) == "pass"


def test_two_files_whose_problems_share_an_id_are_refused(models, files, tmp_path, capsys):
    other = write_rows(tmp_path / "other.jsonl", [{"question": "Else?", "answer": "It is 1.\n#### 1"}])
    tasks = [word for path in (files[1], other) for word in ("--tasks", f"gsm8k?source=local:{path}")]
    line = ["evaluate", str(models / "child"), "--base", str(models / "parent"), "--out", str(tmp_path / "run")]
    assert run([*line, *tasks, "--precision", "fp32"]) == 2
    assert "same id (given: gsm8k/test/1)" in capsys.readouterr().err


def test_prompts_are_kept_out_of_data(files, tmp_path):
    share = EvaluationShare(task="prompts", count=9, source=f"local:{files[0]}")
    assert len(load_problems(share, {})) == 3
    second = LONG.split("\n\n")[2]
    rows = [
        {"prompt": LONG, "response": "Long."},
        {"prompt": "Say something.", "response": f"So: {second}"},
        {"prompt": "Tell of a boat.", "response": "A boat."},
        {"prompt": "What is 2 and 3 and 4 and more of them?", "response": "Many."},
        {"prompt": "Name the tallest tree of that wood.", "response": "Oak."},
    ]
    source = f"local:{write_rows(tmp_path / 'chats.jsonl', rows)}"
    config = DataConfig(sources=(SourceShare(source=source, count=9),), evaluation=(share,))
    prepare(config, byte_tokenizer(), tmp_path / "data", ledger=None, progress=None)
    removed = [json.loads(line) for line in (tmp_path / "data" / "removed.jsonl").read_text().splitlines()]
    assert len(removed) == 3
    assert all("prompts/question/" in json.dumps(row) for row in removed)
