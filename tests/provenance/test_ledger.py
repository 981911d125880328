"""The ledger notices every change, survives a kill and a full disk, and has one writer at a time."""

import os
import resource
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.clock import SystemClock
from ar2diff.errors import LedgerError, RunError, SpaceError
from ar2diff.hashing import canonical_json, sha256_bytes
from ar2diff.provenance.ledger import GENESIS, LEDGER_NAME, POLICY, Ledger, find_events, read_ledger, verify_ledger

NUM_EVENTS = 6


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A ledger of a few events, with its size and head as a checkpoint keeps them."""
    folder = tmp_path_factory.mktemp("clean")
    with Ledger.open(folder, clock=SystemClock(), run_id="run") as ledger:
        for step in range(NUM_EVENTS - 1):
            ledger.append("train_step", {"step": step, "loss": 1.5, "text": "é|\n"})
        return (folder / LEDGER_NAME).read_bytes(), ledger.size, ledger.head


def is_caught(folder, content, size, head):
    path = folder / LEDGER_NAME
    path.write_bytes(content)
    try:
        verify_ledger(path, size=size, head=head)
    except LedgerError:
        return True
    return False


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_changed_byte_is_caught_against_the_recorded_head(clean, scratch, data):
    content, size, head = clean
    at = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert is_caught(scratch, bytes(changed), size, head)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_changed_byte_before_the_last_line_is_caught_by_the_chain_alone(clean, scratch, data):
    content, _, _ = clean
    last_line = content.rfind(b"\n", 0, -1) + 1
    at = data.draw(st.integers(0, last_line - 1))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert is_caught(scratch, bytes(changed), None, None)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_removed_repeated_and_swapped_lines_are_caught(clean, scratch, data):
    lines = clean[0].splitlines(keepends=True)
    first, second = sorted(data.draw(st.permutations(range(len(lines))))[:2])
    removed = lines[:first] + lines[first + 1 :]
    repeated = lines[: first + 1] + lines[first:]
    swapped = list(lines)
    swapped[first], swapped[second] = lines[second], lines[first]
    for changed in (removed, repeated, swapped):
        assert is_caught(scratch, b"".join(changed), None, None)


@given(cut=st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_a_cut_end_is_caught_by_the_recorded_head_only(clean, scratch, cut):
    content, size, head = clean
    shorter = content[: max(0, len(content) - cut)]
    assert is_caught(scratch, shorter, size, head)
    assert is_caught(scratch, shorter, size, None)
    assert not is_caught(scratch, shorter, None, None)


def test_lines_after_the_recorded_head_are_allowed(clean, scratch):
    content, size, head = clean
    path = scratch / LEDGER_NAME
    path.write_bytes(content)
    with Ledger.open(scratch, clock=SystemClock(), run_id="ignored") as ledger:
        ledger.append("later", {})
        assert ledger.run_id == "run"
    assert len(verify_ledger(path, size=size, head=head)) == size + 1


def relinked(bodies):
    """A ledger of these bodies with a chain that holds, as a careful forger writes it."""
    lines, prev = b"", GENESIS
    for body in bodies:
        line = canonical_json(body | {"prev": prev})
        lines, prev = lines + line + b"\n", sha256_bytes(line)
    return lines


START = {"seq": 0, "time": "t", "type": "run_started", "data": {"run_id": "r", "policy": POLICY}}


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ([START | {"type": "fetch"}], "does not start a run"),
        ([START | {"data": {"run_id": "r", "policy": "other"}}], "does not start a run"),
        ([START | {"seq": 1}], "sequence number 1"),
        ([START | {"seq": False}], "sequence number False"),
        ([START | {"data": []}], "not a ledger event"),
        ([START | {"time": None}], "not a ledger event"),
        ([START | {"extra": 1}], "canonical form"),
        ([{"seq": 0}], "not a ledger event"),
        ([START, START | {"seq": 2}], "line 2 has sequence number 2"),
    ],
)
def test_a_well_chained_line_of_the_wrong_shape_is_named(scratch, bodies, message):
    path = scratch / LEDGER_NAME
    path.write_bytes(relinked(bodies))
    with pytest.raises(LedgerError, match=message):
        list(read_ledger(path))


def test_a_line_that_is_not_in_canonical_form_is_named(scratch):
    path = scratch / LEDGER_NAME
    path.write_bytes(relinked([START]).replace(b'":"', b'": "', 1))
    with pytest.raises(LedgerError, match="line 1 is not in canonical form"):
        list(read_ledger(path))


def test_a_killed_writer_leaves_whole_lines_and_the_next_one_goes_on(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ar2diff.clock import SystemClock;"
        "from ar2diff.provenance.ledger import Ledger\n"
        "ledger = Ledger.open(Path(sys.argv[1]), clock=SystemClock(), run_id='killed')\n"
        "print('go', flush=True)\n"
        "while True: ledger.append('step', {'text': 'x' * 500}, durable=False)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    child.stdout.readline()
    while (tmp_path / LEDGER_NAME).stat().st_size < 10_000:
        pass
    child.kill()
    child.wait()
    child.stdout.close()
    path = tmp_path / LEDGER_NAME
    with path.open("ab") as stream:
        stream.write(b'{"data":{"torn')
    before = len(list(read_ledger(path)))
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="next") as ledger:
        assert ledger.size == before > 10
        ledger.append("resumed", {})
    assert [event.type for event in read_ledger(path)][-1] == "resumed"
    assert path.read_bytes().endswith(b"\n")


def test_a_ledger_that_is_one_torn_line_starts_anew(tmp_path):
    (tmp_path / LEDGER_NAME).write_bytes(b'{"data":{"policy')
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="fresh") as ledger:
        assert (ledger.size, ledger.run_id) == (1, "fresh")


def test_a_broken_ledger_is_not_written_to_and_its_lock_is_given_back(tmp_path):
    path = tmp_path / LEDGER_NAME
    path.write_bytes(b"{}\n")
    for _ in range(2):
        with pytest.raises(LedgerError, match="line 1"):
            Ledger.open(tmp_path, clock=SystemClock(), run_id="x")
    assert path.read_bytes() == b"{}\n"


def test_a_second_writer_in_another_process_is_refused_until_the_first_is_done(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ar2diff.clock import SystemClock;"
        "from ar2diff.provenance.ledger import Ledger;"
        "Ledger.open(Path(sys.argv[1]), clock=SystemClock(), run_id='second').close()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="first"):
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        with pytest.raises(RunError, match="another process"):
            Ledger.open(tmp_path, clock=SystemClock(), run_id="second")
    assert "RunError: another process is working on this run" in refused.stderr
    assert subprocess.run(command, check=False).returncode == 0
    assert len(list(read_ledger(tmp_path / LEDGER_NAME))) == 1


def test_a_clock_that_goes_back_is_recorded_as_it_is(tmp_path):
    class BackwardsClock(SystemClock):
        now = datetime(2026, 1, 1, tzinfo=UTC)

        def utc(self):
            self.now -= timedelta(days=1)
            return self.now

    with Ledger.open(tmp_path, clock=BackwardsClock(), run_id="r") as ledger:
        ledger.append("step", {})
    times = [event.time for event in read_ledger(tmp_path / LEDGER_NAME)]
    assert times == ["2025-12-31T00:00:00.000000+00:00", "2025-12-30T00:00:00.000000+00:00"]


def test_a_full_disk_leaves_whole_lines_and_the_same_writer_goes_on(tmp_path):
    path = tmp_path / LEDGER_NAME
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="r") as ledger:
        whole = path.read_bytes()
        try:
            # The limit lies inside the line, so that part of it is written.
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, old_limits[1]))
            with pytest.raises(SpaceError, match="full"):
                ledger.append("step", {"text": "x" * 200})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
            signal.signal(signal.SIGXFSZ, old_handler)
        assert path.read_bytes() == whole
        ledger.append("step", {"text": "y"})
    assert [event.seq for event in read_ledger(path)] == [0, 1]
    assert [event.data for event in find_events(path, "step")] == [{"text": "y"}]


def test_a_failing_disk_is_raised_as_it_is_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / LEDGER_NAME
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="r") as ledger:
        whole = path.read_bytes()

        def fail(_):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", fail)
            with pytest.raises(OSError, match="Input/output"):
                ledger.append("step", {})
        assert path.read_bytes() == whole
        assert ledger.append("step", {}).seq == 1


@given(
    kind=st.text(max_size=8),
    data=st.dictionaries(
        st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.none()
    ),
)
def test_a_line_is_the_canonical_json_of_its_event(kind, data):
    from ar2diff.provenance.ledger import _build_line

    body = {"seq": 7, "prev": "ab" * 32, "time": "2026-01-02T03:04:05.000006+00:00", "type": kind, "data": data}
    assert _build_line(body["seq"], body["prev"], body["time"], kind, data) == canonical_json(body)


def test_events_that_are_not_json_values_are_refused_and_change_nothing(tmp_path):
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="r") as ledger:
        for bad in (float("nan"), 2**60, "\ud800", object()):
            with pytest.raises((rfc8785.CanonicalizationError, UnicodeEncodeError)):
                ledger.append("step", {"value": bad})
        assert ledger.append("step", {}).seq == 1
    assert len(list(read_ledger(tmp_path / LEDGER_NAME))) == 2


def test_an_absent_ledger_has_no_events(tmp_path):
    assert find_events(tmp_path / LEDGER_NAME, "fetch") == []


def test_only_durable_appends_wait_for_the_disk(tmp_path, monkeypatch):
    calls = []
    real = os.fsync
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="r") as ledger:
        monkeypatch.setattr("os.fsync", lambda fd: calls.append(fd) or real(fd))
        for _ in range(5):
            ledger.append("step", {}, durable=False)
        assert calls == []
        ledger.append("step", {})
        assert len(calls) == 1


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"seq":' * 50_000, b"\xff", b"9" * 5000, b"null"])
def test_a_line_that_no_parser_takes_is_a_broken_ledger(tmp_path, line):
    path = tmp_path / LEDGER_NAME
    path.write_bytes(line + b"\n")
    with pytest.raises(LedgerError, match="ledger line 1"):
        list(read_ledger(path))
    with pytest.raises(LedgerError, match="ledger line 1"):
        Ledger.open(tmp_path, clock=SystemClock(), run_id="run")


def test_a_first_line_that_names_no_run_is_a_broken_ledger(tmp_path):
    body = {"seq": 0, "prev": GENESIS, "time": "t", "type": "run_started", "data": {"policy": POLICY}}
    (tmp_path / LEDGER_NAME).write_bytes(canonical_json(body) + b"\n")
    with pytest.raises(LedgerError, match="does not start a run"):
        Ledger.open(tmp_path, clock=SystemClock(), run_id="run")


def test_the_first_line_follows_nothing_that_was_cut_off_before_it(tmp_path):
    path = tmp_path / LEDGER_NAME
    path.write_bytes(canonical_json(START | {"prev": "1" * 64}) + b"\n")
    with pytest.raises(LedgerError, match="line 1 does not follow"):
        list(read_ledger(path))
