"""Training again gives what was logged; a run that was killed, or made by other code, is judged rightly."""

import pytest
from forgeries import data_of
from tampering import edit_lines, forge, of_type, put, read_events

from ar2diff.audit.report import render_explanation, render_text
from ar2diff.audit.run_files import AuditUsageError
from ar2diff.audit.table import REPLAY_ID
from ar2diff.audit.verify import audit_run
from ar2diff.clock import SystemClock
from ar2diff.hashing import sha256_file
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger
from ar2diff.provenance.signing import HEADS_NAME


def replay(run, steps):
    return audit_run(run, only=("A18",), replay=steps).find(REPLAY_ID)


def test_the_last_steps_come_out_the_same_to_the_bit(made_run):
    claim = replay(made_run.folder, 2)
    assert claim.verdict == "pass", claim.as_json()
    assert claim.level.startswith("from step-000004")
    assert "step 6: the same bits" in claim.level
    assert any(check.what == "step 6: tensor root" for check in claim.checks)


def test_more_steps_than_follow_a_checkpoint_begin_at_the_base(made_run):
    claim = replay(made_run.folder, 6)
    assert claim.verdict == "pass", claim.as_json()
    assert claim.level.startswith("from the base")


def test_a_loss_that_no_training_gave_is_found_even_if_everything_else_fits(copied, made_run):
    edit_lines(copied / "metrics.jsonl", lambda lines: lines[5].update(diffusion_loss=0.1))
    digest = sha256_file(copied / "metrics.jsonl")
    forge(copied, made_run.signer, data_of("train_finished", metrics_sha256=digest))
    assert audit_run(copied, only=("A9",)).verdict == "pass"
    claim = replay(copied, 2)
    assert [check.what for check in claim.checks if check.verdict == "fail"] == ["step 6: diffusion_loss"]


def test_a_replay_has_steps_and_is_explained(made_run):
    with pytest.raises(AuditUsageError, match="at least one"):
        replay(made_run.folder, 0)
    assert "--replay" in render_explanation(REPLAY_ID)


def test_a_run_of_other_code_lacks_evidence_where_that_code_draws_other_inputs(copied, made_run):
    """An upgraded installation is no forger; the same difference under the run's own code is one."""
    edit_lines(copied / "metrics.jsonl", lambda lines: lines[5].update(batch_sha256="0" * 64))
    digest = sha256_file(copied / "metrics.jsonl")
    forge(copied, made_run.signer, data_of("train_finished", metrics_sha256=digest))
    assert audit_run(copied, only=("A9",)).verdict == "fail"
    assert replay(copied, 2).verdict == "fail"

    def upgrade(events):
        of_type(events, "code")[-1]["data"]["files"]["diffusion/noise.py"] = "0" * 64

    forge(copied, made_run.signer, upgrade)
    assert audit_run(copied, only=("A9",)).verdict == "evidence missing"
    assert replay(copied, 2).verdict == "evidence missing"
    assert audit_run(copied, only=("A16",)).verdict == "fail"


def test_a_killed_run_is_unproven_at_its_end_until_somebody_goes_on(copied, made_run):
    lines = (copied / LEDGER_NAME).read_bytes()
    with Ledger.open(copied, clock=SystemClock(), run_id="x", signer=made_run.signer) as ledger:
        ledger.append("note", {}, durable=False)
        killed = (copied / LEDGER_NAME).read_bytes()
    heads = (copied / HEADS_NAME).read_bytes()
    put(copied / LEDGER_NAME, killed)
    put(copied / HEADS_NAME, heads[: heads[:-1].rfind(b"\n") + 1] + b'{"payl')
    assert len(killed) > len(lines)
    assert audit_run(copied, only=("A18",)).verdict == "fail"
    with Ledger.open(copied, clock=SystemClock(), run_id="x", signer=made_run.signer):
        pass
    report = audit_run(copied, only=("A18",))
    assert report.verdict == "pass", render_text(report)


def test_a_clock_that_went_back_is_no_alarm(copied, made_run):
    def turn_back(events):
        events[-2]["time"] = "2001-01-01T00:00:00.000000+00:00"

    forge(copied, made_run.signer, turn_back)
    assert audit_run(copied, only=("A2", "A11", "A18")).verdict == "pass"


def test_the_ledger_of_the_made_run_names_the_surroundings_of_every_stage(made_run):
    kinds = [event["type"] for event in read_events(made_run.folder)]
    stages = [at for at, kind in enumerate(kinds) if kind in ("fetch", "prepare", "train_started", "evaluate")]
    assert stages
    assert all(kinds[at - 1] == "stage_surroundings" for at in stages)
