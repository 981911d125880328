"""An honest run passes, wherever it lies and however it came to be; a damaged one never ends in a traceback."""

import base64
import json
import shutil
import subprocess
import sys

import pytest
from made_run import copy_run, make_run
from tampering import checkpoint, flip, forge, of_type, put, read_events

from ar2diff.audit.html import render_html
from ar2diff.audit.report import render_explanation, render_text
from ar2diff.audit.run_files import AuditUsageError
from ar2diff.audit.table import CLAIMS
from ar2diff.audit.verify import audit_run
from ar2diff.cli import run as run_command
from ar2diff.clock import SystemClock
from ar2diff.provenance.ledger import Ledger

TORCH_CLAIMS = ("A9", "A14")


@pytest.fixture(scope="module")
def report(made_run):
    return audit_run(made_run.folder, deep=True)


def test_an_honest_run_passes_every_claim_it_makes(report):
    verdicts = {claim.id: claim.verdict for claim in report.claims}
    assert verdicts == dict.fromkeys(CLAIMS, "pass") | {"A13": "not claimed"}
    assert (report.verdict, report.exit_code) == ("pass", 0)


def test_a_copied_run_under_another_path_gives_the_same_answer(made_run, report, tmp_path):
    shutil.copytree(made_run.folder, tmp_path / "elsewhere" / "copy")
    assert audit_run(tmp_path / "elsewhere" / "copy", deep=True).as_json() == report.as_json()


def test_auditing_changes_nothing_in_the_run(made_run):
    def listing():
        return {str(p): p.stat().st_mtime_ns for p in made_run.folder.rglob("*")}

    before = listing()
    audit_run(made_run.folder)
    assert listing() == before


def test_a_run_that_was_never_stopped_passes_too(tmp_path):
    made = make_run(tmp_path, interrupt=False)
    report = audit_run(made.folder)
    assert report.verdict == "pass", render_text(report)


def test_a_run_that_went_on_after_its_documents_were_written_passes_again(copied, made_run):
    # A later process opens the ledger, finds all done, and closes it.
    with Ledger.open(
        copied, clock=SystemClock(), run_id="x", signer=made_run.signer, session=read_events(copied)[2]["data"]
    ):
        pass
    assert audit_run(copied).verdict == "pass"


def test_a_second_key_is_nobodys_until_the_auditor_names_it(copied, made_run):
    from ar2diff.provenance.signing import HeadSigner

    other = HeadSigner.generate()
    with Ledger.open(copied, clock=SystemClock(), run_id="x", signer=other):
        pass
    one, two = made_run.signer.public_key["keyid"], other.public_key["keyid"]
    verdicts = {None: "evidence missing", one: "fail", two: "fail", f"{one},{two}": "pass"}
    for keys, verdict in verdicts.items():
        assert audit_run(copied, only=("A18",), expected_key=keys).verdict == verdict, keys
    level = audit_run(copied, only=("A18",)).find("A18").level
    assert one in level
    assert two in level


def test_the_expected_key_is_enough_and_another_is_not(made_run):
    key = made_run.signer.public_key["keyid"]
    assert audit_run(made_run.folder, only=("A18",), expected_key=key).verdict == "pass"
    assert audit_run(made_run.folder, only=("A18",), expected_key="0" * 64).verdict == "fail"


def test_a_run_without_an_evaluation_claims_none(copied, made_run):
    forge(copied, made_run.signer, lambda events: events.remove(of_type(events, "evaluate")[-1]))
    assert audit_run(copied, only=("A17",)).find("A17").verdict == "fail"
    (copied / "eval.json").unlink()
    (copied / "eval_samples.jsonl").unlink()
    report = audit_run(copied, only=("A7", "A11", "A17"))
    assert [claim.verdict for claim in report.claims] == ["pass", "pass", "not claimed"]


def test_files_that_the_user_adds_beside_the_run_are_no_alarm(copied):
    put(copied / "notes.txt", "Went well.")
    put(copied / "audit.json", "{}")
    assert audit_run(copied).verdict == "pass"


def test_an_empty_run_lacks_evidence_and_fails_nothing(tmp_path):
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="empty"):
        pass
    report = audit_run(tmp_path)
    assert report.verdict == "evidence missing", render_text(report)
    assert not [claim.id for claim in report.claims if claim.verdict == "fail"]


def test_no_damage_to_any_file_ends_the_audit_in_a_traceback(made_run, tmp_path):
    files = sorted(p.relative_to(made_run.folder) for p in made_run.folder.rglob("*") if p.is_file())
    for number, name in enumerate(files):
        copy = copy_run(made_run.folder, tmp_path / str(number))
        content = (copy / name).read_bytes()
        damage = (b"", content[: len(content) // 2], b"\xff" + content[1:], b"[1]", b'{"a": {}}\n')[number % 5]
        put(copy / name, damage)
        report = audit_run(copy, only=tuple(c for c in CLAIMS if c != "A14"))
        assert name.name == "loss.png" or report.verdict != "pass", name
        shutil.rmtree(copy)


def test_absent_folders_never_end_the_audit_in_a_traceback(made_run, tmp_path):
    for name in ("base", "data", "sources", "checkpoints"):
        copy = copy_run(made_run.folder, tmp_path / name)
        shutil.rmtree(copy / name)
        assert audit_run(copy).verdict != "pass"


def test_file_and_log_claims_run_without_torch(made_run):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from ar2diff.audit.verify import audit_run\n"
        "report = audit_run(Path(sys.argv[1]))\n"
        "print({c.id: c.verdict for c in report.claims})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(made_run.folder)], capture_output=True, text=True, check=True
    )
    verdicts = json.loads(done.stdout.replace("'", '"'))
    assert {verdicts.pop(claim) for claim in TORCH_CLAIMS} == {"evidence missing"}
    assert verdicts.pop("A13") == "not claimed"
    assert set(verdicts.values()) == {"pass"}


def test_the_command_ends_with_the_code_of_the_verdict(made_run, copied, tmp_path, capsys):
    assert run_command(["audit", str(made_run.folder), "--only", "A1,A18"]) == 0
    assert "verdict: pass (2 pass)" in capsys.readouterr().out
    flip(copied / "base/model.safetensors")
    assert run_command(["audit", str(copied), "--only", "A1"]) == 1
    (copied / "base/model.safetensors").unlink()
    assert run_command(["audit", str(copied), "--only", "A1"]) == 2
    capsys.readouterr()
    usage = (
        ["audit"],
        ["audit", str(tmp_path / "nowhere")],
        ["audit", str(copied), "--only", "A99"],
        ["audit", "--explain", "B1"],
        ["audit", "--nonsense"],
    )
    for tokens in usage:
        assert run_command(tokens) == 3, tokens


def test_the_command_prints_json_that_names_both_values_and_their_places(copied, capsys):
    flip(copied / "base/model.safetensors")
    run_command(["audit", str(copied), "--only", "A1", "--json"])
    content = json.loads(capsys.readouterr().out)
    failed = [check for check in content["claims"][0]["checks"] if check["verdict"] == "fail"]
    assert failed[0]["claimed"] != failed[0]["found"]
    assert failed[0]["claimed_in"].startswith("ledger.jsonl line")
    assert failed[0]["found_in"] == "base/model.safetensors"


def test_every_claim_is_explained(capsys):
    for claim_id in CLAIMS:
        assert run_command(["audit", "--explain", claim_id]) == 0
        assert CLAIMS[claim_id].title in capsys.readouterr().out
        assert render_explanation(claim_id).startswith(f"{claim_id}: ")


def test_the_page_says_the_verdict_first_and_shows_the_chain(report, tmp_path, made_run):
    page = render_html(report)
    assert page.index('class="verdict pass"') < page.index("<svg") < page.index("<details")
    assert all(f'<details id="{claim_id}"' in page for claim_id in CLAIMS)
    assert run_command(["audit", str(made_run.folder), "--only", "A18", "--html", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")


def test_nothing_of_a_run_reaches_the_page_as_markup(copied, made_run):
    evil = "<script>alert(1)</script>\"'&<svg onload=x>"

    def spoil(events):
        events[0]["data"]["run_id"] = evil
        of_type(events, "train_started")[0]["data"]["missing"] = [evil]

    forge(copied, made_run.signer, spoil)
    put(copied / "base" / "<img src=x>.json", "{}")
    page = render_html(audit_run(copied, only=("A1", "A3", "A18")))
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("<svg") == 2
    assert "&lt;script&gt;" in page


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(AuditUsageError, match="not a run directory"):
        audit_run(tmp_path)


def test_a_checkpoint_of_half_a_step_name_is_no_checkpoint(copied):
    (copied / "checkpoints" / "step-x").mkdir()
    report = audit_run(copied, only=("A11",))
    assert report.find("A11").verdict == "fail"
    assert checkpoint(copied).name == "step-x"


def test_the_statements_chain_the_stages_and_end_with_the_summary(made_run, tmp_path):
    path = tmp_path / "statements.jsonl"
    assert run_command(["audit", str(made_run.folder), "--only", "A1,A18", "--statements", str(path)]) == 0
    envelopes = [json.loads(line) for line in path.read_text().splitlines()]
    made = [json.loads(base64.b64decode(envelope["payload"])) for envelope in envelopes]
    kinds = [statement["predicate"]["buildDefinition"]["buildType"] for statement in made[:-1]]
    assert kinds[0] == "ar2diff:stage/v1/fetch"
    assert kinds[-1] == "ar2diff:stage/v1/evaluate"
    known = []
    for statement in made[:-1]:
        assert statement["predicate"]["buildDefinition"]["resolvedDependencies"] == known
        known += statement["subject"]
    assert made[-1]["predicate"]["verificationResult"] == "PASSED"
    assert made[-1]["predicate"]["ar2diff"]["claims"] == {"A1": "pass", "A18": "pass"}
    assert all(envelope["payloadType"] == "application/vnd.in-toto+json" for envelope in envelopes)
