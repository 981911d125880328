"""An evaluation over a server: each answer is in that server's own log, and no other log will do."""

import json

import pytest
from made_run import copy_run, serving
from tampering import checkpoint, edit_lines, forge, of_type

from ar2diff.audit.live.server import LiveServer
from ar2diff.audit.report import render_text
from ar2diff.audit.verify import audit_run
from ar2diff.errors import ModelError, RunError
from ar2diff.hashing import sha256_file
from ar2diff.pipelines.served_answers import ServedEngine

LOG = "server_log.jsonl"
OTHER = "0" * 64


def refit(run, signer, **changes):
    """Make the ledger fit the run's changed files, as the holder of the key."""

    def fit(events):
        data = of_type(events, "evaluate")[-1]["data"]
        for kind, name in (("report", "eval.json"), ("samples", "eval_samples.jsonl"), ("server_log", LOG)):
            if (run / name).is_file():
                data[kind] = {"path": name, "sha256": sha256_file(run / name)}
        data.update(changes)

    forge(run, signer, fit)


def log(edit):
    """A forgery of the log."""
    return lambda run: edit_lines(run / LOG, edit)


def choice(**changes):
    """A forgery of what the log says of the last answer."""
    return log(lambda lines: lines[-1]["choices"][0].update(changes))


def last_sample(edit):
    """A forgery of the last kept answer, in the report's order."""
    return lambda run: edit_lines(run / "eval_samples.jsonl", lambda lines: edit(lines[-1]))


def swap_answers(run):
    """Two answers of one mode change places, with their requests left as they were."""

    def swap(lines):
        one, two = lines[-1], lines[-2]
        one["request_id"], two["request_id"] = two["request_id"], one["request_id"]

    edit_lines(run / "eval_samples.jsonl", swap)


def verified_choice(lines):
    return next(c for line in lines for c in line["choices"] if c["mode"] == "verified" and not c["copy_drafts"])


FORGERIES = {
    "a line less": log(lambda lines: lines.pop()),
    "a line twice": log(lambda lines: lines.append(lines[-1])),
    "another text": choice(text_sha256=OTHER),
    "other tokens": choice(token_ids_sha256=OTHER),
    "another prompt": choice(prompt_sha256=OTHER),
    "fewer passes": choice(num_forward_passes=1),
    "another mode": choice(mode="verified"),
    "other steps": choice(policy="top_k", denoising_steps=7),
    "a threshold that is none": choice(policy="threshold", policy_parameter="high"),
    "sampled": choice(temperature=0.7),
    "drafts that were copied": log(lambda lines: verified_choice(lines).update(copy_drafts=True)),
    "another end": choice(finish_reason="other"),
    "no choices": log(lambda lines: lines[-1].update(choices=[])),
    "another model": log(lambda lines: lines[-1].update(tensor_root=OTHER)),
    "an answer that came from elsewhere": last_sample(lambda line: line.update(request_id=None)),
    "one request for two answers": lambda run: edit_lines(
        run / "eval_samples.jsonl", lambda lines: lines[-1].update(request_id=lines[-2]["request_id"])
    ),
    "answers that change places": swap_answers,
    "passes of the sample": last_sample(lambda line: line.update(num_forward_passes=1)),
}


@pytest.fixture
def served(served_run, tmp_path):
    return copy_run(served_run.folder, tmp_path / "served")


def test_an_honest_evaluation_over_a_server_passes(served_run):
    report = audit_run(served_run.folder, only=("A7", "A11", "A17", "A18"))
    assert report.verdict == "pass", render_text(report)
    samples = [json.loads(line) for line in (served_run.folder / "eval_samples.jsonl").read_text().splitlines()]
    named = {sample["mode"] for sample in samples if sample["request_id"] is not None}
    assert named == {sample["mode"] for sample in samples} - {"parent"}
    assert {"ar", "verified", "diffusion, steps=2", "diffusion, threshold=0.5"} <= named
    text = (served_run.folder / LOG).read_text()
    assert not any(sample["text"] and sample["text"] in text for sample in samples if len(sample["text"]) > 8)


def test_the_server_answers_as_an_engine_in_this_process_does(made_run, served_run):
    def read(run):
        lines = [json.loads(line) for line in (run / "eval_samples.jsonl").read_text().splitlines()]
        wanted = ("text", "token_ids", "finish_reason", "num_forward_passes", "correct", "reveal_passes")
        return {(line["mode"], line["problem_id"]): [line[name] for name in wanted] for line in lines}

    here, there = read(made_run.folder), read(served_run.folder)
    assert here.items() <= there.items()


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_answer_or_log_is_caught_though_the_ledger_fits_it(served, served_run, name):
    FORGERIES[name](served)
    refit(served, served_run.signer)
    report = audit_run(served, only=("A17",))
    assert report.verdict == "fail", render_text(report)


def test_a_log_that_is_gone_or_not_the_logged_one_is_seen(served, served_run):
    log(lambda lines: lines.append({"event": "other"}))(served)
    assert audit_run(served, only=("A17",)).verdict == "fail"
    (served / LOG).unlink()
    assert audit_run(served, only=("A17",)).verdict == "evidence missing"
    refit(served, served_run.signer, server={"tensor_root": OTHER})
    assert audit_run(served, only=("A17",)).verdict == "fail"


def test_a_server_of_another_model_is_refused_before_it_is_asked(made_run, tmp_path):
    with (
        serving(made_run.folder / "averaged", tmp_path / "log") as url,
        pytest.raises(ModelError, match="another model"),
    ):
        ServedEngine(LiveServer(url), checkpoint(made_run.folder))


def test_a_log_of_another_server_is_refused(made_run, served_run, tmp_path):
    newest = checkpoint(made_run.folder)
    with serving(newest, tmp_path / "log") as url:
        with pytest.raises(RunError, match="no request log"):
            ServedEngine(LiveServer(url), newest, log=tmp_path / "none")
        engine = ServedEngine(LiveServer(url), newest, log=tmp_path / "log")
        with pytest.raises(RunError, match="lacks 1 of 1"):
            engine.keep_log(tmp_path, {"somebody's"})
