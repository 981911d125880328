"""Fetching is idempotent, safe to kill, and always logged; local and procedural sources say what is wrong."""

import fcntl
import json
import os
import subprocess
import sys

import pytest

from ar2diff.errors import SourceError, SpaceError
from ar2diff.hashing import sha256_bytes
from ar2diff.provenance.git_objects import FileDigest, write_pointer
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, find_events
from ar2diff.sources.cache import Expected
from ar2diff.sources.fetch import verify_files
from ar2diff.sources.receipt import RECEIPT_NAME, Receipt, read_receipt
from ar2diff.sources.spec import LocalSource, ProceduralSource


@pytest.fixture
def ledger(tmp_path):
    from ar2diff.clock import SystemClock

    with Ledger.open(tmp_path, clock=SystemClock(), run_id="test") as opened:
        yield opened


def fetch_events(tmp_path):
    return [event.data for event in find_events(tmp_path / LEDGER_NAME, "fetch")]


def test_a_second_fetch_asks_nobody_and_still_logs(hub, model, fetch_here, tmp_path, ledger):
    first = fetch_here(model, ledger=ledger)
    hub.requests.clear()
    assert fetch_here(model, ledger=ledger) == first
    assert hub.requests == []
    events = fetch_events(tmp_path)
    assert [event["cached"] for event in events] == [False, True]
    assert events[0]["files"] == events[1]["files"] == first.as_json()["files"]


def test_the_event_carries_the_facts_of_every_file_and_the_listing_by_digest(model, fetch_here, tmp_path, ledger):
    receipt = fetch_here(model, ledger=ledger)
    (event,) = fetch_events(tmp_path)
    assert set(event) == {
        *("source", "kind", "revision", "resolved_from", "files", "folder", "cached", "elapsed_s", "tree")
    }
    for file in event["files"]:
        assert set(file) == {"path", "size_bytes", "sha256", "url", "etag", "status", "from_cache"}
    assert event["tree"]["entries"] == len(receipt.tree)
    assert event["folder"] == "base"


def test_a_changed_file_is_fetched_again(hub, model, fetch_here, tmp_path):
    fetch_here(model)
    (tmp_path / "base/config.json").write_bytes(b'{"model_type": "other"}')
    (tmp_path / "base/README.md").unlink()
    assert verify_files(tmp_path / "base", read_receipt(tmp_path / "base")) == ["README.md", "config.json"]
    assert verify_files(tmp_path / "base", fetch_here(model)) == []


def test_another_folder_takes_the_files_from_the_cache_and_says_so(hub, model, fetch_here, tmp_path, ledger):
    first = fetch_here(model)
    hub.requests.clear()
    second = fetch_here(model, out="other", ledger=ledger)
    assert not any("/resolve/" in request.path for request in hub.requests)
    assert all(file.from_cache and file.status == 200 for file in second.files)
    assert [file.sha256 for file in second.files] == [file.sha256 for file in first.files]
    assert fetch_events(tmp_path)[0]["cached"] is False


def test_a_rotted_cache_is_noticed_and_fetched_again(hub, model, fetch_here, tmp_path, cache):
    first = fetch_here(model)
    weights = next(file for file in first.files if file.path == "model.safetensors")
    path = cache.path(Expected(sha256=weights.sha256))
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    second = fetch_here(model, out="other")
    assert [file.path for file in second.files if not file.from_cache] == ["model.safetensors"]
    assert verify_files(tmp_path / "other", second) == []


def test_a_fault_is_told_by_size_and_by_each_digest():
    found = FileDigest(2, "a" * 64, "b" * 40)
    assert Expected(sha256="a" * 64, blob_id="b" * 40, size_bytes=2).fault(found) is None
    assert Expected(size_bytes=1_000).fault(found) == "2 bytes where 1,000 are promised"
    assert "sha256" in Expected(sha256="c" * 64).fault(found)
    assert "git blob" in Expected(blob_id="c" * 40).fault(found)


def test_a_cache_without_the_servers_answer_still_serves(hub, model, fetch_here, tmp_path, cache):
    fetch_here(model)
    for answer in cache.folder.glob("*.json"):
        answer.write_text("not json")
    receipt = fetch_here(model, out="other")
    assert all(file.status is None and file.from_cache for file in receipt.files)


def test_files_of_another_source_are_never_mixed_in(hub, model, fetch_here, tmp_path):
    fetch_here(model)
    other = hub.add_repo("owner/other", {"model.safetensors": b"other"})
    with pytest.raises(SourceError, match=r"holds another source.*Choose another folder"):
        fetch_here(f"hub:owner/other@{other}")


def test_a_killed_fetch_is_taken_up_by_the_next_one(hub, model, fetch_here, tmp_path):
    hub.faults.delay_s = 0.1
    code = (
        "import sys; from pathlib import Path; from ar2diff.clock import SystemClock;"
        "from ar2diff.sources.fetch import fetch; from ar2diff.sources.spec import parse_source;"
        "fetch(parse_source(sys.argv[1]), Path(sys.argv[2]) / 'base', cache_dir=Path(sys.argv[2]) / 'cache',"
        "ledger=None, clock=SystemClock(), progress=None, endpoint=sys.argv[3])"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(model), str(tmp_path), hub.endpoint])
    while not [p for p in (tmp_path / "cache").glob("blob-*") if not p.suffix] and child.poll() is None:
        pass
    child.kill()
    child.wait()
    hub.faults.delay_s = 0.0
    assert not (tmp_path / "base" / RECEIPT_NAME).exists()
    receipt = fetch_here(model)
    assert receipt.files[0].from_cache
    assert verify_files(tmp_path / "base", receipt) == []


def test_a_fetch_killed_just_before_the_file_gets_its_name_keeps_the_servers_answer(
    hub, model, fetch_here, cache, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fetch_here(model)
    # `write_json` renames too, so the answer is put where the kill would have left it.
    (partial,) = cache.folder.glob("*.partial")
    answer = {"url": "http://127.0.0.1/x", "etag": "e", "status": 200}
    partial.with_suffix(".json").write_text(json.dumps(answer))
    hub.requests.clear()
    first = fetch_here(model).files[0]
    assert (first.url, first.etag, first.status) == tuple(answer.values())
    assert not any(first.path in request.path for request in hub.requests)


def test_two_downloads_of_one_file_at_once_are_refused(hub, fetch_here, cache):
    commit = hub.add_repo("owner/one", {"model.safetensors": b"weights"})
    cache.folder.mkdir()
    partial = cache.partial(Expected(sha256=sha256_bytes(b"weights")))
    with partial.open("ab") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        with pytest.raises(SourceError, match="another process is downloading the same file"):
            fetch_here(f"hub:owner/one@{commit}")
    fetch_here(f"hub:owner/one@{commit}")


def test_a_disk_that_fills_up_leaves_a_file_to_go_on_from(hub, model, fetch_here, tmp_path):
    code = (
        "import resource, signal, sys; from pathlib import Path; from ar2diff.clock import SystemClock;"
        "from ar2diff.sources.fetch import fetch; from ar2diff.sources.spec import parse_source;"
        "import errno, ar2diff.files as f;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000));"
        # A file-size limit answers EFBIG where a full disk answers ENOSPC.
        "errno.ENOSPC = errno.EFBIG;"
        "fetch(parse_source(sys.argv[1]), Path(sys.argv[2]) / 'base', cache_dir=Path(sys.argv[2]) / 'cache',"
        "ledger=None, clock=SystemClock(), progress=None, endpoint=sys.argv[3])"
    )
    command = [sys.executable, "-c", code, str(model), str(tmp_path), hub.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "SpaceError: " in done.stderr
    assert f"model.safetensors of {model}" in done.stderr
    assert verify_files(tmp_path / "base", fetch_here(model)) == []


def test_a_folder_that_cannot_be_written_is_named(model, fetch_here, tmp_path):
    (tmp_path / "base").write_text("a file in the way")
    with pytest.raises(SourceError, match=r"cannot write the files: .*base.*Check the folder's rights"):
        fetch_here(model)


def test_a_damaged_receipt_is_named(model, fetch_here, tmp_path):
    fetch_here(model)
    path = tmp_path / "base" / RECEIPT_NAME
    good = json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(SourceError, match=r"receipt.json"):
        fetch_here(model)
    for bad in ({"source": "x"}, good | {"other": 1}, good | {"files": [{"path": "x"}]}):
        with pytest.raises(SourceError, match="not a receipt"):
            Receipt.from_json(bad)
    outside = good["files"][0] | {"path": "../x"}
    with pytest.raises(SourceError, match="outside its folder"):
        Receipt.from_json(good | {"files": [outside]})


def test_a_local_file_is_copied_with_its_digest(fetch_here, tmp_path, ledger):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n')
    source = LocalSource(path=str(path), sha256=sha256_bytes(path.read_bytes()))
    receipt = fetch_here(source, ledger=ledger)
    assert (tmp_path / "base/rows.jsonl").read_bytes() == path.read_bytes()
    assert receipt.files[0].sha256 == source.sha256
    assert fetch_here(source, ledger=ledger) == receipt
    assert [event["cached"] for event in fetch_events(tmp_path)] == [False, True]
    path.write_bytes(b'{"a": 2}\n')
    with pytest.raises(SourceError, match="not the pinned file: sha256"):
        fetch_here(source)


def test_a_local_file_that_changes_while_it_is_copied_is_refused(fetch_here, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"before")
    monkeypatch.setattr("ar2diff.sources.local.copy_whole", lambda _, target: target.write_bytes(b"after"))
    with pytest.raises(SourceError, match="changed while it was copied"):
        fetch_here(LocalSource(path=str(path)))
    assert not (tmp_path / "base/rows.jsonl").exists()


def test_a_local_file_that_is_no_data_is_told_why(fetch_here, tmp_path):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(SourceError, match=r"file not found.*rows.jsonl"):
        fetch_here(LocalSource(path=str(path)))
    path.write_bytes(b"")
    with pytest.raises(SourceError, match="empty"):
        fetch_here(LocalSource(path=str(path)))
    path.write_bytes(write_pointer("0" * 64, 5))
    with pytest.raises(SourceError, match=r"Git LFS pointer.*git lfs pull"):
        fetch_here(LocalSource(path=str(path)))
    with pytest.raises(SourceError, match="not a folder"):
        fetch_here(LocalSource(path=str(tmp_path)))
    with pytest.raises(SourceError, match="cannot read"):
        fetch_here(LocalSource(path=str(path / "inside")))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(SourceError, match="not a regular file"):
        fetch_here(LocalSource(path=str(fifo)))


def test_a_full_disk_is_noticed_before_a_local_copy(fetch_here, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"rows")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0})())
    with pytest.raises(SpaceError):
        fetch_here(LocalSource(path=str(path)))


def test_a_generator_counts_only_at_its_pinned_version(fetch_here, tmp_path, ledger):
    from importlib.metadata import version

    right = ProceduralSource(library="numpy", version=version("numpy"), task="sums", count=3)
    receipt = fetch_here(right, ledger=ledger)
    assert (receipt.files, receipt.kind) == ((), "procedural")
    fetch_here(right, ledger=ledger)
    assert [event["cached"] for event in fetch_events(tmp_path)] == [False, True]
    for library, given in (("numpy", version("numpy")), ("no-such-library", "not installed")):
        with pytest.raises(SourceError, match=rf"needs {library}==0.0.1 \(given: {given}\)"):
            fetch_here(ProceduralSource(library=library, version="0.0.1", task="sums", count=3), out="other")
