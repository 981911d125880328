"""Forgers who own every file of a run and not its key, and some who hold the key too: none of these gets a pass."""

import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from forgeries import data_of, report, samples
from tampering import (
    checkpoint,
    edit_array,
    edit_json,
    edit_lines,
    flip,
    of_type,
    put,
    read_events,
    write_events,
)

from ar2diff.audit.report import render_text
from ar2diff.audit.verify import audit_run
from ar2diff.clock import SystemClock
from ar2diff.hashing import sha256_file
from ar2diff.provenance.documents import RENDERERS, write_all_documents
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger
from ar2diff.provenance.signing import HeadSigner

Act = Callable[[Path, HeadSigner], object]
FORGERIES: dict[str, tuple[str, Act]] = {}


def rewrite_ledger(edit):
    """Edit the ledger, chain it anew and render its documents, as whoever lacks the key would."""

    def act(run, signer):
        events = read_events(run)
        edit(events)
        write_events(run, events)
        for name in RENDERERS:
            (run / name).unlink()
        write_all_documents(run)

    return act


def write_on(run, signer):
    """Better numbers, in further lines that another key signs."""
    with Ledger.open(run, clock=SystemClock(), run_id="x", signer=HeadSigner.generate()) as ledger:
        ledger.append("evaluate", of_type(read_events(run), "evaluate")[-1]["data"])
    write_all_documents(run)


def swap_shards(run, signer):
    """Two files of the shard change places."""
    one, two = run / "data/prompt_lens.npy", run / "data/document_offsets.npy"
    first, second = one.read_bytes(), two.read_bytes()
    put(one, second)
    put(two, first)


def edit_receipt_and_data(run, signer):
    """A token is changed, and the receipt and its mark fit; the ledger is not touched."""
    edit_array(run / "data/token_ids.npy", lambda values: values.__setitem__(9, 65))
    edit_json(
        run / "data/receipt.json",
        lambda c: c["files"].update({"token_ids.npy": sha256_file(run / "data/token_ids.npy")}),
    )
    put(run / "data/COMPLETE", sha256_file(run / "data/receipt.json") + "\n")


def refit_checkpoint(run, signer):
    """A byte of the weights is changed, and the state and its mark fit; the ledger is not touched."""
    folder = checkpoint(run)
    flip(folder / "model.safetensors")
    edit_json(
        folder / "training.json",
        lambda c: c["files"].update({"model.safetensors": sha256_file(folder / "model.safetensors")}),
    )
    put(folder / "COMPLETE", sha256_file(folder / "training.json") + "\n")


def older_weights(run, signer):
    """An earlier checkpoint under the newest one's name."""
    first = sorted((run / "checkpoints").glob("step-*"))[0]
    shutil.rmtree(checkpoint(run))
    shutil.copytree(first, run / "checkpoints/step-000006")


def release_other_weights(run, signer):
    """A release beside the checkpoint that it is not made from."""
    shutil.copytree(checkpoint(run), run / "release")
    flip(run / "release/model.safetensors")


def rename_alike(run, signer):
    """A name in DOWNLOADS.md gets a letter of another script."""
    text = (run / "DOWNLOADS.md").read_text()
    assert "config.json" in text
    put(run / "DOWNLOADS.md", text.replace("config.json", "c\u043enfig.json", 1))


def decompose(run, signer):
    """The card with a letter written in two code points, after a legitimate one."""
    put(run / "MODEL_CARD.md", unicodedata.normalize("NFD", (run / "MODEL_CARD.md").read_text() + "\u00e9"))


def sparse_base(run, signer):
    """The weights are a hole of a hundred terabytes."""
    (run / "base/model.safetensors").unlink()
    with (run / "base/model.safetensors").open("wb") as stream:
        stream.truncate(10**13)


def link_weights(run, signer):
    """The shipped weights are a link to somewhere else."""
    path = checkpoint(run) / "model.safetensors"
    elsewhere = run.parent / "elsewhere.safetensors"
    shutil.copyfile(path, elsewhere)
    path.unlink()
    path.symlink_to(elsewhere)


def twice(run, signer):
    """A right answer is counted twice, and the report fits it."""
    lines = [json.loads(line) for line in (run / "eval_samples.jsonl").read_text().splitlines()]
    samples(lambda kept: kept.append(lines[0]))(run, signer)


def leave_out(run, signer):
    """A problem is left out of every mode."""
    first = json.loads((run / "eval_samples.jsonl").read_text().splitlines()[0])["problem_id"]
    samples(lambda kept: kept.__setitem__(slice(None), [s for s in kept if s["problem_id"] != first]))(run, signer)


def drop_from_one(run, signer):
    """A problem is left out of one mode."""
    samples(lambda kept: kept.pop())(run, signer)


def score_line(run, signer):
    """A better score stands before the true one."""
    report(lambda c: c["scores"].insert(0, {**c["scores"][0], "accuracy": 1.0, "num_correct": 2}))(run, signer)


FORGERIES |= {
    "A18 a ledger line, with every hash after it": ("A18", rewrite_ledger(data_of("train_finished", elapsed_s=1.5))),
    "A18 an event twice": ("A18", rewrite_ledger(lambda events: events.insert(5, events[5]))),
    "A18 other times": ("A18", rewrite_ledger(lambda events: events[3].update(time="2020-01-01T00:00:00+00:00"))),
    "A18 an event left out": ("A18", rewrite_ledger(lambda events: events.pop(4))),
    "A18 a number beyond all bounds": (
        "A18",
        lambda run, _: put(
            run / LEDGER_NAME, (run / LEDGER_NAME).read_bytes().replace(b'"step":2', b'"step":2' + b"0" * 5000, 1)
        ),
    ),
    "A18 no number": (
        "A18",
        lambda run, _: put(
            run / LEDGER_NAME, (run / LEDGER_NAME).read_bytes().replace(b'"step":2', b'"step":NaN', 1)
        ),
    ),
    "A5 files of the shard change places": ("A5", swap_shards),
    "A5 a token, with receipt and mark": ("A5", edit_receipt_and_data),
    "A11 a byte of the weights, with state and mark": ("A11", refit_checkpoint),
    "A11 older weights under the newest name": ("A11", older_weights),
    "A11 a release of other weights": ("A11", release_other_weights),
    "A11 a name that looks alike": ("A11", rename_alike),
    "A11 a letter in two parts": ("A11", decompose),
    "A11 a file more in a checkpoint": ("A11", lambda run, _: put(checkpoint(run) / "tokenizer.JSON", "{}")),
    "A11 a link for the weights": ("A11", link_weights),
    "A11 numbers in architecture.json": (
        "A11",
        lambda run, _: edit_json(run / "architecture.json", lambda c: c.update(block_size=1e3)),
    ),
    "A1 a sparse file": ("A1", sparse_base),
    "A1 a file that differs in case": ("A1", lambda run, _: put(run / "base/Config.json", "{}")),
    "A1 another address in the receipt": (
        "A1",
        lambda run, _: edit_json(run / "base/receipt.json", lambda c: c["files"][0].update(url="http://elsewhere/x")),
    ),
    "A3 other settings in run.json": (
        "A3",
        lambda run, _: edit_json(run / "run.json", lambda c: c["config"].update(seed=7)),
    ),
    "A9 a loss that is no number": (
        "A9",
        lambda run, _: edit_lines(run / "metrics.jsonl", lambda c: c[1].update(diffusion_loss=float("nan"))),
    ),
    "A17 an answer counted twice": ("A17", twice),
    "A17 a problem left out of one mode": ("A17", drop_from_one),
    "A17 a problem left out everywhere": ("A17", leave_out),
    "A17 a score that stands before the true one": ("A17", score_line),
    "A17 another text for the same tokens": ("A17", samples(lambda lines: lines[0].update(text="42"))),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_clever_forger_is_caught(name, copied, made_run):
    claim, act = FORGERIES[name]
    act(copied, made_run.signer)
    found = audit_run(copied, only=(claim,)).find(claim)
    assert found.verdict == "fail", found.as_json()


def test_lines_that_another_key_adds_do_not_pass(copied, made_run):
    write_on(copied, made_run.signer)
    report = audit_run(copied, only=("A18",))
    assert report.verdict == "evidence missing", render_text(report)
    assert audit_run(copied, only=("A18",), expected_key=made_run.signer.public_key["keyid"]).verdict == "fail"


def test_an_answer_counted_twice_is_seen_though_the_report_counts_it_too(copied, made_run):
    twice(copied, made_run.signer)
    failed = [c.what for c in audit_run(copied, only=("A17",)).find("A17").checks if c.verdict == "fail"]
    assert "problems answered more than once" in failed


def test_a_release_of_the_trained_weights_and_one_for_another_engine_pass(copied, made_run):
    shutil.copytree(checkpoint(copied), copied / "release")
    assert audit_run(copied, only=("A11",)).verdict == "pass"
    edit_json(copied / "release/config.json", lambda c: c.pop("ar2diff"))
    flip(copied / "release/model.safetensors")
    assert audit_run(copied, only=("A11",)).verdict == "pass"
