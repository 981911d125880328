"""Signed heads see what a hash chain cannot, and what a run ran in is logged without any secret."""

import fractions
import importlib
import json
import multiprocessing
import resource
import signal
from collections import OrderedDict
from importlib import metadata
from pathlib import PurePath

import pytest

from ar2diff.clock import SystemClock
from ar2diff.errors import LedgerError, SpaceError
from ar2diff.provenance.environment import describe_code, describe_library, describe_session, describe_stage
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, read_ledger
from ar2diff.provenance.signing import HEADS_NAME, HeadSigner, read_heads
from ar2diff.provenance.unpickling import UnpicklingWatch


@pytest.fixture
def signer():
    return HeadSigner.generate()


def test_stage_ends_and_closing_are_signed(tmp_path, signer):
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="r", signer=signer) as ledger:
        ledger.append("note", {})
        ledger.append("fetch", {})
        ledger.append("note", {})
    events = list(read_ledger(tmp_path / "ledger.jsonl"))
    heads = read_heads(tmp_path / HEADS_NAME, [signer.public_key])
    assert [(head.size, head.fault) for head in heads] == [(4, None), (5, None)]
    assert [head.head for head in heads] == [events[3].digest, events[4].digest]
    assert {head.run_id for head in heads} == {"r"}


def test_a_key_is_logged_once(tmp_path, signer):
    for _ in range(2):
        with Ledger.open(tmp_path, clock=SystemClock(), run_id="r", signer=signer):
            pass
    logged = [event.data for event in read_ledger(tmp_path / "ledger.jsonl") if event.type == "signer"]
    assert logged == [signer.public_key]


def test_nothing_is_signed_twice_or_without_a_signer(tmp_path, signer):
    with Ledger.open(tmp_path / "a", clock=SystemClock(), run_id="r", signer=signer) as ledger:
        ledger.append("fetch", {})
    assert len(read_heads(tmp_path / "a" / HEADS_NAME, [signer.public_key])) == 1
    with Ledger.open(tmp_path / "b", clock=SystemClock(), run_id="r") as ledger:
        ledger.append("fetch", {})
    assert not (tmp_path / "b" / HEADS_NAME).exists()


def test_another_key_or_payload_does_not_hold(tmp_path, signer):
    path = tmp_path / HEADS_NAME
    signer.append(path, run_id="r", size=3, head="ab")
    assert read_heads(path, [HeadSigner.generate().public_key])[0].fault is not None
    envelope = json.loads(path.read_text())
    envelope["payloadType"] = "text/plain"
    path.write_text(json.dumps(envelope) + "\nnot json\n[]\n{}\n")
    assert all(head.fault is not None for head in read_heads(path, [signer.public_key]))


def test_a_key_file_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "deep" / "key.pem"
    first = HeadSigner.open(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert HeadSigner.open(path).public_key == first.public_key
    path.write_text("no key")
    with pytest.raises(LedgerError, match="signing key"):
        HeadSigner.open(path)


def test_names_of_credentials_are_logged_and_never_their_values():
    environ = {
        "HF_TOKEN": "hf_secret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "MY_PASSWORD": "hunter2",
        "OPENAI_API_KEY": "sk-1",
        "OPENAI_BASE_URL": "http://secret.example",
        "EMPTY_TOKEN": "",
        "TOKENIZERS_PARALLELISM": "false",
        "KEYBOARD": "us",
        "SSH_AUTH_SOCK": "/tmp/x",
    }
    session = describe_session(environ)
    assert session["credential_names"] == ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_PASSWORD", "OPENAI_API_KEY"]
    assert session["provider_url_names"] == ["OPENAI_BASE_URL"]
    assert not [
        value for value in environ.values() if len(value) > 3 and value in json.dumps(session) and value != "false"
    ]


def test_the_code_is_known_by_the_digest_of_every_imported_file():
    code = describe_code()
    assert len(code["files"]["provenance/environment.py"]) == 64
    assert code["versions"]["ar2diff"]


def test_half_a_head_that_a_killed_signer_left_is_dropped_by_the_next_one(tmp_path, signer):
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="r", signer=signer) as ledger:
        ledger.append("fetch", {})
    path = tmp_path / HEADS_NAME
    path.write_bytes(path.read_bytes() + b'{"payload": "abc')
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="r", signer=signer) as ledger:
        ledger.append("prepare", {})
    heads = read_heads(path, [signer.public_key])
    assert [head.fault for head in heads] == [None] * len(heads)
    assert heads[-1].size == ledger.size


def test_a_full_disk_leaves_the_signed_heads_whole(tmp_path, signer):
    path = tmp_path / HEADS_NAME
    signer.append(path, run_id="r", size=1, head="0" * 64)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(SpaceError):
            signer.append(path, run_id="r", size=2, head="1" * 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert path.read_bytes() == before


def test_each_stage_says_what_surrounds_it_before_its_own_line(tmp_path):
    seen = iter([["a.B"], []])
    with Ledger.open(
        tmp_path, clock=SystemClock(), run_id="r", look_around=lambda: describe_stage({"MY_TOKEN": "x"}, next(seen))
    ) as ledger:
        ledger.append("fetch", {})
        ledger.append("checkpoint_saved", {})
        ledger.append("evaluate", {})
    events = [(e.type, e.data) for e in read_ledger(tmp_path / LEDGER_NAME)][1:]
    around = {"credential_names": ["MY_TOKEN"], "provider_url_names": []}
    assert events == [
        ("stage_surroundings", {"stage": "fetch", **around, "unpickled": ["a.B"]}),
        ("fetch", {}),
        ("checkpoint_saved", {}),
        ("stage_surroundings", {"stage": "evaluate", **around, "unpickled": []}),
        ("evaluate", {}),
    ]


def test_an_unpickled_class_is_seen_and_what_worker_processes_send_is_not():
    pickle = importlib.import_module("pickle")  # what the watch is for; the product never imports it
    watch = UnpicklingWatch()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(PurePath, ("a",)) == PurePath("a")
    pickle.loads(pickle.dumps([1, {"a": 2}]))
    assert watch.list_classes() == []
    pickle.loads(pickle.dumps(OrderedDict(a=1)))
    assert watch.list_classes() == ["collections.OrderedDict"]
    assert UnpicklingWatch().list_classes() == []


def test_a_library_is_known_by_the_hashes_of_its_wheel():
    found = describe_library("numpy")
    assert found is not None
    assert found["version"] == metadata.version("numpy")
    assert len(found["files_sha256"]) == 64
    assert "cp" in found["tags"]
    assert describe_library("no-such-library") is None


def test_what_the_ranks_of_a_training_send_each_other_is_not_counted(tmp_path):
    from torch import distributed

    pickle = importlib.import_module("pickle")
    watch = UnpicklingWatch()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        said = [None]
        distributed.all_gather_object(said, fractions.Fraction(1, 3))
    finally:
        distributed.destroy_process_group()
    assert said == [fractions.Fraction(1, 3)]
    assert watch.list_classes() == []
    pickle.loads(pickle.dumps(fractions.Fraction(1, 3)))
    assert watch.list_classes() == ["fractions.Fraction"]
