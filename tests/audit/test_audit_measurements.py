"""A17 over `ar2diff harness` and `ar2diff bench`: figures follow from samples and turns; no code of a run is run."""

import json
import shutil

import pytest
from tampering import edit_json, edit_lines, forge, of_type, put

from ar2diff.audit.verify import audit_run
from ar2diff.clock import SystemClock
from ar2diff.data.config import EvaluationShare
from ar2diff.hashing import sha256_file
from ar2diff.models.loading import save_model
from ar2diff.pipelines.bench import BenchConfig, Peers, bench_run
from ar2diff.pipelines.harness import HarnessConfig, evaluate_with_harness
from ar2diff.pipelines.stages import RunContext
from ar2diff.provenance.ledger import Ledger
from ar2diff.provenance.signing import HeadSigner
from ar2diff.testing.harness_tasks import TASK_NAMES, write_tasks
from ar2diff.testing.models import tiny_diffusion, tiny_model

SIGNER = HeadSigner.generate()


class Silent:
    def stage(self, title): ...

    def evaluation(self, done, total, mode): ...


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run that holds nothing but its measurements."""
    scratch = tmp_path_factory.mktemp("measured")
    run = scratch / "run"
    save_model(scratch / "model", tiny_model(2, max_seq_len=512), tiny_diffusion())
    with Ledger.open(run, clock=SystemClock(), run_id="x", signer=SIGNER) as ledger:
        context = RunContext(
            run_dir=run,
            cache_dir=scratch,
            library_dir=scratch,
            ledger=ledger,
            clock=SystemClock(),
            view=Silent(),
        )
        harness = HarnessConfig(tasks=TASK_NAMES, include=write_tasks(scratch / "tasks"), precision="fp32")
        evaluate_with_harness(scratch / "model", harness, context)
        bench = BenchConfig(
            problems=(EvaluationShare(task="structured", count=4),),
            modes="ar,diffusion",
            steps=(2,),
            thresholds=(),
            batch_sizes=(1, 2),
            max_tokens=4,
            repeats=2,
            precision="fp32",
        )
        bench_run(scratch / "model", None, bench, Peers(), context)
    return run


@pytest.fixture
def run(measured, tmp_path):
    return shutil.copytree(measured, tmp_path / "run")


def verdict(run):
    return audit_run(run, only=("A17",)).find("A17").verdict


def resign(run, kind, files):
    """The ledger says the digests of the files as they are now: only what they hold can give them away."""

    def edit(events):
        for name, path in files.items():
            of_type(events, kind)[-1]["data"][name]["sha256"] = sha256_file(run / path)

    forge(run, SIGNER, edit, documents=False)


HARNESS = {"report": "harness.json", "samples": "harness_samples.jsonl"}


def change_samples(run, edit, *, signed=True):
    edit_lines(run / "harness_samples.jsonl", edit)
    if signed:
        resign(run, "harness", HARNESS)


def change_report(run, edit):
    edit_json(run / "harness.json", edit)
    resign(run, "harness", HARNESS)


def test_honest_measurements_pass_and_every_sample_is_graded_again(run):
    found = audit_run(run, only=("A17",)).find("A17")
    assert found.verdict == "pass"
    graded = [check.what for check in found.checks if "another grade" in check.what]
    assert len(graded) == 1 + 2 + 3


def sample_of(lines, task):
    return next(line for line in lines if line["task"] == task)


def grade(task, metric, value):
    return lambda lines: sample_of(lines, task).update({metric: value})


@pytest.mark.parametrize(
    "edit",
    [
        grade("local_gen", "exact_match", 1.0),
        grade("local_text", "byte_perplexity", [-1.0, 12.0]),
        grade("local_text", "word_perplexity", [-1.0, 2.0]),
        lambda lines: sample_of(lines, "local_gen").update(filtered_resps=[sample_of(lines, "local_gen")["target"]]),
        lambda lines: sample_of(lines, "local_choice").update(acc=1.0 - sample_of(lines, "local_choice")["acc"]),
        lambda lines: sample_of(lines, "local_choice").update(
            acc_norm=1.0 - sample_of(lines, "local_choice")["acc_norm"]
        ),
        lambda lines: lines.pop(),
        lambda lines: sample_of(lines, "local_gen").update(task="local_other"),
    ],
)
def test_a_changed_sample_fails_also_under_its_own_digest(run, edit):
    change_samples(run, edit)
    assert verdict(run) == "fail"


def test_a_better_figure_fails(run):
    change_report(run, lambda c: c["tasks"]["local_choice"]["results"].update({"acc,none": 0.99}))
    assert verdict(run) == "fail"


def test_another_model_fails(run):
    change_report(run, lambda c: c["about"].update(root="0" * 64))
    assert verdict(run) == "fail"


def test_a_changed_byte_fails(run):
    change_samples(run, lambda lines: lines[0].update(doc_id=lines[0]["doc_id"], note="x"), signed=False)
    assert verdict(run) == "fail"


def test_a_missing_file_and_a_missing_event_are_told_apart(run):
    (run / "harness_samples.jsonl").unlink()
    assert verdict(run) == "evidence missing"
    forge(run, SIGNER, lambda events: events.remove(of_type(events, "harness")[-1]), documents=False)
    assert verdict(run) == "fail"


def test_a_metric_without_a_second_grader_is_evidence_missing_and_never_a_pass(run):
    change_report(
        run,
        lambda c: c["tasks"]["local_gen"]["settings"]["metric_list"][0].update(regexes_to_ignore=["x"]),
    )
    assert verdict(run) == "evidence missing"


def test_withheld_texts_are_evidence_missing(run):
    change_samples(run, lambda lines: [line.pop("filtered_resps") for line in lines])
    assert verdict(run) == "evidence missing"


def change_speed(run, edit):
    edit_json(run / "speed.json", edit)
    resign(run, "bench", {"report": "speed.json"})


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c["rows"][0].update(tokens_per_s=1e6),
        lambda c: c["turns"][0].update(seconds=c["turns"][0]["seconds"] / 100),
        lambda c: c["turns"].pop(0),
        lambda c: c["rows"].append({**c["rows"][0], "name": "magic"}),
        lambda c: c["about"]["roots"].update(converted="0" * 64),
    ],
)
def test_a_changed_speed_fails_also_under_its_own_digest(run, edit):
    change_speed(run, edit)
    assert verdict(run) == "fail"


def test_a_speed_that_nobody_logged_fails(run):
    forge(run, SIGNER, lambda events: events.remove(of_type(events, "bench")[-1]), documents=False)
    assert verdict(run) == "fail"
    put(run / "speed.json", json.dumps({}))
    assert verdict(run) == "fail"
