"""Generated documents follow from the ledger alone, and any edit to them is found."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.clock import SystemClock
from ar2diff.errors import LedgerError
from ar2diff.provenance.documents import (
    ARCHITECTURE_NAME,
    DOWNLOADS_NAME,
    render_architecture,
    render_downloads,
    verify_documents,
    write_architecture,
    write_downloads,
)
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, read_ledger

FILE = {
    "path": "model.safetensors",
    "size_bytes": 5033637528,
    "sha256": "ab" * 32,
    "status": 200,
    "from_cache": False,
}
FETCH = {
    "source": "hub:owner/name@" + "a" * 40,
    "kind": "hub",
    "revision": "a" * 40,
    "resolved_from": "main",
    "files": [FILE, FILE | {"path": "odd|name\nx.json", "size_bytes": 1234, "status": None, "from_cache": True}],
    "folder": "base",
    "cached": False,
    "tree": {"entries": 2, "sha256": "cd" * 32},
}
STAGES = [
    ("fetch", FETCH),
    ("fetch", FETCH | {"cached": True, "resolved_from": None}),
    ("fetch", {"source": "procedural:x==1/y?count=1&seed=0&start=0", "kind": "procedural", "files": []}),
    ("prepare", {"rows": 10}),
    ("train_started", {"block_size": 4, "objective": "nelbo", "base": "hub:owner/name"}),
    ("train_finished", {"step": 100}),
    ("evaluate", {"engine": {"block_size": 8}, "block_size": 8}),
]


@pytest.fixture
def run_dir(tmp_path):
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="run") as ledger:
        for event_type, data in STAGES:
            ledger.append(event_type, data)
    write_downloads(tmp_path)
    write_architecture(tmp_path)
    return tmp_path


def test_the_downloads_table_shows_every_fact_of_every_file(run_dir):
    text = (run_dir / DOWNLOADS_NAME).read_text()
    event = next(event for event in read_ledger(run_dir / LEDGER_NAME) if event.type == "fetch")
    row = f"| model.safetensors | 5,033,637,528 | {'ab' * 32} | HTTP 200 | {event.time} | 2 |"
    assert row in text.splitlines()
    assert "| odd\\|name x.json | 1,234 |" in text
    assert "no HTTP, from the cache" in text
    assert "2 files, 5,033,638,762 bytes." in text
    assert "Resolved from `main`." in text
    assert text.count("Already here") == 1
    assert "No files: made anew" in text


def test_the_architecture_takes_the_last_stage_that_names_a_field(run_dir):
    document = json.loads((run_dir / ARCHITECTURE_NAME).read_text())
    assert document["run_id"] == "run"
    assert (document["block_size"], document["objective"], document["mask_token"]) == (8, "nelbo", None)
    assert document["data"] == [{"rows": 10}]
    assert document["training"]["finished"] == [{"step": 100}]
    assert document["downloads"][0]["size_bytes"] == 5033638762


def test_the_same_ledger_gives_the_same_bytes(run_dir):
    events = list(read_ledger(run_dir / LEDGER_NAME))
    assert render_downloads(events) == render_downloads(iter(events)) == (run_dir / DOWNLOADS_NAME).read_text()
    assert render_architecture(iter(events)) == (run_dir / ARCHITECTURE_NAME).read_text()
    assert verify_documents(run_dir) == []


def test_an_empty_run_says_so():
    assert "Nothing was downloaded." in render_downloads([])
    assert json.loads(render_architecture([]))["base"] is None


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_changed_byte_of_a_document_is_found(tmp_path_factory, data):
    run_dir = tmp_path_factory.getbasetemp() / "edited"
    if not run_dir.exists():
        with Ledger.open(run_dir, clock=SystemClock(), run_id="run") as ledger:
            for event_type, content in STAGES:
                ledger.append(event_type, content)
    name = data.draw(st.sampled_from([DOWNLOADS_NAME, ARCHITECTURE_NAME]))
    write_downloads(run_dir)
    write_architecture(run_dir)
    changed = bytearray((run_dir / name).read_bytes())
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    (run_dir / name).write_bytes(changed)
    assert {difference.document for difference in verify_documents(run_dir)} == {name}


def test_a_wrong_byte_count_is_shown_with_both_values(run_dir):
    path = run_dir / DOWNLOADS_NAME
    path.write_text(path.read_text().replace("5,033,637,528", "5,033,635,288", 1))
    (difference,) = verify_documents(run_dir)
    assert "5,033,637,528" in difference.expected
    assert "5,033,635,288" in difference.found
    assert path.read_text().splitlines()[difference.line - 1] == difference.found


def test_absent_longer_and_shorter_documents_differ(run_dir):
    (run_dir / ARCHITECTURE_NAME).unlink()
    path = run_dir / DOWNLOADS_NAME
    whole = path.read_text()
    path.write_text(whole + "one more line\n")
    added, longer, absent = verify_documents(run_dir)
    assert (added.found, longer.found, absent.found) == ("one more line", "", None)
    path.write_text(whole[:-1])
    assert verify_documents(run_dir)[0].found is None


def test_a_folder_without_a_ledger_is_named(tmp_path):
    with pytest.raises(LedgerError, match="no ledger"):
        write_downloads(tmp_path)


def test_bytes_that_only_look_like_the_expected_text_are_found(tmp_path):
    # A byte that is no UTF-8 shows as a backslash and three characters, which a name may also hold.
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="run") as ledger:
        ledger.append("fetch", FETCH | {"folder": "base\\xff"})
    write_downloads(tmp_path)
    path = write_architecture(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"base\\\\xff", b"base\\\xff"))
    assert len(verify_documents(tmp_path)) == 1
