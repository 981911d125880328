"""Benchmarks from pinned hub repositories, with the columns that are published, through evaluation and audit."""

import csv
import io
import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from ar2diff.audit.verify import audit_run
from ar2diff.clock import SystemClock
from ar2diff.data.config import EvaluationShare
from ar2diff.errors import DataError, SourceError
from ar2diff.evals.scores import Answer
from ar2diff.models.loading import save_model
from ar2diff.pipelines import evaluation
from ar2diff.pipelines.evaluation import evaluate_run
from ar2diff.pipelines.recipe import EvaluationConfig
from ar2diff.pipelines.stages import RunContext, build_problems, fetch_problems
from ar2diff.provenance.ledger import Ledger
from ar2diff.provenance.signing import HeadSigner
from ar2diff.sources.progress import SilentProgress
from ar2diff.tasks.table import find_task
from ar2diff.testing.hub import LoopbackHub
from ar2diff.testing.models import tiny_diffusion, tiny_model

MATH = [
    {
        "problem": rf"What is ${idx} + \frac{{1}}{{2}}$?",
        "solution": rf"It is $\boxed{{{idx}.5}}$.",
        "answer": f"{idx}.5",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": f"test/prealgebra/{idx}.json",
    }
    for idx in range(3)
]
MEDICINE = [
    {
        "id": f"id-{idx}",
        "question": f"Which bone is number {idx}?",
        "opa": "Femur",
        "opb": "Tibia",
        "opc": "Ulna",
        "opd": "Radius",
        "cop": idx % 4,
        "choice_type": "single",
        "exp": None,
        "subject_name": "Anatomy",
        "topic_name": None,
    }
    for idx in range(3)
]
SECRET = "The unpublished lighthouse particle"
SCIENCE = [
    {
        "Pre-Revision Question": "an earlier text",
        "Question": f"{SECRET}, number {idx}: which is it, in MeV?",
        "Correct Answer": f"quark secret {idx}",
        "Incorrect Answer 1": "lepton secret",
        "Incorrect Answer 2": "boson secret",
        "Incorrect Answer 3": "gluon, secret\nof two lines",
        "Explanation": "a long text",
        "Subdomain": "Particle physics",
        "Record ID": f"rec{idx}",
    }
    for idx in range(3)
]


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def csv_file(rows):
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


REPOS = {
    "math500": ("HuggingFaceH4/MATH-500", "test.jsonl", jsonl(MATH)),
    "medmcqa": ("openlifescienceai/medmcqa", "data/validation-00000-of-00001.parquet", parquet(MEDICINE)),
    "gpqa_diamond": ("Idavidrein/gpqa", "gpqa_diamond.csv", csv_file(SCIENCE)),
}
NAMES = tuple(REPOS)


class Silent:
    download = SilentProgress()

    def stage(self, title): ...

    def evaluation(self, done, total, mode): ...


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture
def context(hub, tmp_path):
    with Ledger.open(tmp_path / "run", clock=SystemClock(), run_id="x", signer=HeadSigner.generate()) as ledger:
        yield RunContext(
            run_dir=tmp_path / "run",
            cache_dir=tmp_path / "cache",
            library_dir=tmp_path,
            ledger=ledger,
            clock=SystemClock(),
            view=Silent(),
            endpoint=hub.endpoint,
        )


def add(hub, name, *, content=None):
    repo, path, stored = REPOS[name]
    commit = hub.add_repo(repo, {path: content or stored, "README.md": b"About.\n"}, dataset=True)
    return EvaluationShare(task=name, count=3, source=f"hub:datasets/{repo}@{commit}#files={path}")


@pytest.mark.parametrize("name", NAMES)
def test_the_published_columns_are_problems_whose_references_are_right(hub, context, name):
    share = add(hub, name)
    problems = build_problems([share], fetch_problems([share], context))
    assert len({problem.id for problem in problems}) == len(problems) == 3
    assert all(find_task(name).score(problem, problem.reference) for problem in problems)
    # A second run of it downloads nothing.
    asked = len(hub.requests)
    assert build_problems([share], fetch_problems([share], context)) == problems
    assert len(hub.requests) == asked


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_over_the_hub_is_graded_and_passes_the_audit(hub, context, tmp_path, name, monkeypatch):
    save_model(tmp_path / "child", tiny_model(2, max_seq_len=1024), tiny_diffusion())
    save_model(tmp_path / "parent", tiny_model(2, max_seq_len=1024), None)
    share = add(hub, name)
    config = EvaluationConfig(problems=(share,), modes="ar,diffusion", steps=(2,), thresholds=(), max_tokens=6)
    real = evaluation.answer_problems

    def knowing(contestants, problems, mode, **settings):
        """The model's own answers, but a right one to the first problem, cut short as the engine would."""
        answers = real(contestants, problems, mode, **settings)
        text = problems[0].reference.splitlines()[-1]
        ids = tuple(contestants.tokenizer.encode(text))
        right = replace(answers[0], text=text, token_ids=ids, reveal_passes=(), finish_reason="stop", correct=True)
        return [right, *answers[1:]] if problems[0].id == first else answers

    first = build_problems([share], fetch_problems([share], context))[0].id
    monkeypatch.setattr(evaluation, "answer_problems", knowing)
    report = evaluate_run(
        tmp_path / "parent", tmp_path / "child", replace(config, precision="fp32", bits_problems=1), context
    )
    assert [score.num_correct for score in report.scores if score.domain == "all"] == [1, 1]
    save_model(context.run_dir / "checkpoints" / "step-000001", tiny_model(2, max_seq_len=1024), tiny_diffusion())
    found = audit_run(context.run_dir, only=("A17",))
    assert found.find("A17").verdict == "pass", found.find("A17").checks


def test_no_text_of_gpqa_leaves_the_downloaded_file(hub, context, tmp_path, monkeypatch):
    save_model(tmp_path / "child", tiny_model(2, max_seq_len=1024), tiny_diffusion())
    said = f"{SECRET} is a quark secret 0, so\nAnswer: B"
    real = evaluation.answer_problems

    def repeating(contestants, problems, mode, **settings):
        engine = contestants.converted
        monkeypatch.setattr(engine, "generate_many", lambda requests: [repeat(engine, r) for r in requests])
        return real(contestants, problems, mode, **settings)

    def repeat(engine, request):
        from ar2diff.engine.engine import Engine

        answer = Engine.generate(engine, replace(request, max_tokens=2))
        ids = tuple(engine.loaded.tokenizer.encode(said))
        return replace(answer, text=said, token_ids=ids, finish_reason="stop", passes=())

    monkeypatch.setattr(evaluation, "answer_problems", repeating)
    share = add(hub, "gpqa_diamond")
    config = EvaluationConfig(problems=(share,), modes="ar,verified", max_tokens=6, precision="fp32", bits_problems=1)
    report = evaluate_run(tmp_path / "child", tmp_path / "child", config, context)
    assert {answer.text for answer in report.answers} == {"Answer: B"}
    assert {answer.num_tokens for answer in report.answers} == {len(said.encode())}
    assert report.scores[-1].equal_share == 1.0
    kept = [path for path in context.run_dir.rglob("*") if path.is_file() and "sources" not in path.parts]
    assert len(kept) >= 3
    ids = ", ".join(map(str, SECRET.encode()))
    for path in kept:
        content = path.read_bytes().decode(errors="replace")
        assert "secret" not in content
        assert SECRET not in content
        assert ids not in content
    save_model(context.run_dir / "checkpoints" / "step-000001", tiny_model(2, max_seq_len=1024), tiny_diffusion())
    assert audit_run(context.run_dir, only=("A17",)).find("A17").verdict == "pass"


def test_a_branch_is_no_pin(hub, context):
    share = add(hub, "math500")
    with pytest.raises(SourceError):
        fetch_problems([replace(share, source=share.source.partition("@")[0] + "@main")], context)


def test_a_file_with_other_columns_is_refused_by_its_row(hub, context):
    rows = [MEDICINE[0], {key: value for key, value in MEDICINE[1].items() if key != "opb"}]
    share = add(hub, "medmcqa", content=parquet([{"question": row["question"]} for row in rows]))
    with pytest.raises(DataError, match="not a row of medmcqa: no column"):
        build_problems([share], fetch_problems([share], context))


def test_a_truncated_answer_to_a_withheld_benchmark_says_so():
    answer = Answer(
        mode="ar",
        problem_id="p",
        domain="science",
        text="",
        token_ids=(),
        finish_reason="length",
        correct=False,
        num_forward_passes=1,
        seconds=1.0,
        num_withheld=9,
        ids_sha256="a",
    )
    assert Answer.from_json(json.loads(json.dumps(answer.as_json()))) == answer
    assert answer.is_truncated
