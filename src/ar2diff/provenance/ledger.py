"""`ledger.jsonl`: what a run did, written as it happens, each line chained to the one before.

A line is RFC 8785 JSON `{seq, prev, time, type, data}`; `prev` is the SHA-256 of the previous line's bytes
without the newline (64 zeros at first). The first line names the run and its policy. A killed writer leaves at
most one torn last line, which the next writer drops. Two writers at once are refused by a lock. With a signer, the
head is signed at each stage's end, at each saved checkpoint and on closing.
"""

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from ar2diff.clock import Clock
from ar2diff.errors import LedgerError, RunError
from ar2diff.files import fsync_dir, space_error
from ar2diff.hashing import canonical_json, sha256_bytes
from ar2diff.provenance.environment import SESSION_EVENT, STAGE_EVENT, STAGES
from ar2diff.provenance.signing import HEADS_NAME, SIGNER_EVENT, HeadSigner

LEDGER_NAME = "ledger.jsonl"
GENESIS = "0" * 64
POLICY = "ar2diff-ledger-v1"
# A stage is over, or its result is on disk: what follows must not be able to unsay it.
SIGNED_EVENTS = frozenset(
    {
        "fetch",
        "adapter_applied",
        "parent_answers",
        "prepare",
        "checkpoint_saved",
        "train_finished",
        "train_interrupted",
        "on_policy_round",
        "evaluate",
        "harness",
        "bench",
        "conversion_finished",
    }
)


class LedgerEvent(NamedTuple):
    """One verified line: `digest` is the SHA-256 that the next line must name as `prev`."""

    seq: int
    prev: str
    time: str
    type: str
    data: dict[str, Any]
    digest: str


class Ledger:
    """A writer on one run's ledger; holds the run's lock until closed."""

    def __init__(
        self,
        path: Path,
        stream: IO[bytes],
        clock: Clock,
        run_id: str,
        last: LedgerEvent | None,
        signer: HeadSigner | None = None,
        look_around: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.path = path
        self.run_id = run_id
        self._stream = stream
        self._clock = clock
        self._next_seq = last.seq + 1 if last else 0
        self._head = last.digest if last else GENESIS
        self._end = os.fstat(stream.fileno()).st_size
        self._signer, self._signed_size = signer, 0
        self._look_around = look_around

    @classmethod
    def open(
        cls,
        run_dir: Path,
        *,
        clock: Clock,
        run_id: str,
        signer: HeadSigner | None = None,
        session: dict[str, Any] | None = None,
        look_around: Callable[[], dict[str, Any]] | None = None,
    ) -> "Ledger":
        """Open or create the ledger of `run_dir`; a torn last line is dropped.

        Args:
            run_id: names the run on creation; on reopening the stored id counts and this one is ignored.
            signer: signs heads; its public key is logged.
            session: logged as what this process runs in.
            look_around: asked before each stage's event; what it says is logged as what surrounds that stage.

        Raises:
            RunError: the folder cannot be written, or another process holds the ledger.
            SpaceError: the file system is full.
            LedgerError: a whole line does not hold.
        """
        path = run_dir / LEDGER_NAME
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a line that could not be written whole must not stay behind in a buffer and come out later.
            stream = path.open("a+b", buffering=0)
        except OSError as error:
            raise space_error(error, path) or RunError(
                f"cannot write into the folder: {error.strerror}", given=str(run_dir), fix="Choose another folder"
            ) from error
        try:
            _lock(stream, run_dir)
            _drop_torn_line(stream)
            events = list(read_ledger(path))
        except BaseException:
            stream.close()
            raise
        stored_id = str(events[0].data["run_id"]) if events else run_id
        ledger = cls(path, stream, clock, stored_id, events[-1] if events else None, signer, look_around)
        if not events:
            ledger.append("run_started", {"run_id": run_id, "policy": POLICY})
            fsync_dir(run_dir)
        if signer is not None and signer.public_key not in [e.data for e in events if e.type == SIGNER_EVENT]:
            ledger.append(SIGNER_EVENT, signer.public_key)
        if session is not None:
            ledger.append(SESSION_EVENT, session)
        return ledger

    @property
    def head(self) -> str:
        """SHA-256 of the last line."""
        return self._head

    @property
    def size(self) -> int:
        """Number of lines."""
        return self._next_seq

    def append(self, event_type: str, data: dict[str, Any], *, durable: bool = True) -> LedgerEvent:
        """Write one event; `durable=False` leaves the fsync to a later append.

        Raises:
            SpaceError: the file system is full; the ledger stays valid up to its last whole line.
        """
        if event_type in STAGES and self._look_around is not None:
            self.append(STAGE_EVENT, {"stage": event_type, **self._look_around()}, durable=False)
        time = self._clock.utc().isoformat(timespec="microseconds")
        line = _build_line(self._next_seq, self._head, time, event_type, data)
        self._write(line + b"\n", durable)
        event = LedgerEvent(self._next_seq, self._head, time, event_type, data, sha256_bytes(line))
        self._next_seq, self._head = event.seq + 1, event.digest
        if event_type in SIGNED_EVENTS:
            self._sign()
        return event

    def _sign(self) -> None:
        if self._signer is not None and self._signed_size != self.size:
            heads = self.path.with_name(HEADS_NAME)
            self._signer.append(heads, run_id=self.run_id, size=self.size, head=self.head)
            self._signed_size = self.size

    def _write(self, line: bytes, durable: bool) -> None:
        try:
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, "the line was written in part")
            if durable:
                os.fsync(self._stream.fileno())
        except OSError as error:
            os.ftruncate(self._stream.fileno(), self._end)
            if full := space_error(error, self.path):
                raise full from error
            raise
        self._end += len(line)

    def close(self) -> None:
        """Make everything durable, sign the head and give the lock back."""
        if not self._stream.closed:
            os.fsync(self._stream.fileno())
            self._sign()
            self._stream.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _build_line(seq: int, prev: str, time: str, event_type: str, data: dict[str, Any]) -> bytes:
    """Canonical JSON of an event, its keys in order; only what may need escapes or sorting goes through RFC 8785."""
    kind, content = canonical_json(event_type), canonical_json(data)
    return b'{"data":%b,"prev":"%b","seq":%d,"time":"%b","type":%b}' % (
        content,
        prev.encode(),
        seq,
        time.encode(),
        kind,
    )


def read_ledger(path: Path) -> Iterator[LedgerEvent]:
    """Yield each whole line of a ledger, verified; a torn last line (no newline) ends the reading.

    Raises:
        LedgerError: names the first line that is not canonical JSON, out of sequence or off the chain.
    """
    prev, seq = GENESIS, 0
    with path.open("rb") as stream:
        for raw in stream:
            if not raw.endswith(b"\n"):
                return
            event = _parse_line(raw[:-1], seq, path)
            if event.prev != prev:
                raise _broken(path, seq, "does not follow from the line before it")
            if seq == 0 and not _starts_a_run(event):
                raise _broken(path, seq, "does not start a run under the known policy")
            yield event
            prev, seq = event.digest, seq + 1


def verify_ledger(path: Path, *, size: int | None = None, head: str | None = None) -> list[LedgerEvent]:
    """All events of a ledger, checked against a size and head that were kept elsewhere, such as a signed checkpoint.

    The chain alone does not see a change of the last line, nor lines cut off the end; with `size` and `head` of the
    last known state any change up to there is seen. Lines after that state are allowed.

    Raises:
        LedgerError: a line does not hold, there are fewer than `size` lines, or line `size` is not `head`.
    """
    events = list(read_ledger(path))
    if size is not None and len(events) < size:
        raise LedgerError(
            f"the ledger has {len(events)} whole lines, {size} were written",
            given=str(path),
            fix="Restore the ledger",
        )
    last = events[size - 1] if size else events[-1] if events else None
    if head is not None and (last is None or last.digest != head):
        raise _broken(path, last.seq if last else 0, "is not the recorded head")
    return events


def find_events(path: Path, event_type: str) -> list[LedgerEvent]:
    """All verified events of one type, oldest first; an absent ledger has none."""
    if not path.exists():
        return []
    return [event for event in read_ledger(path) if event.type == event_type]


def _parse_line(line: bytes, seq: int, path: Path) -> LedgerEvent:
    try:
        body = json.loads(line)
        canonical = canonical_json(body)
        event = LedgerEvent(body["seq"], body["prev"], body["time"], body["type"], body["data"], sha256_bytes(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _broken(path, seq, "is not a ledger event") from None
    if canonical != line or set(body) != {"seq", "prev", "time", "type", "data"}:
        raise _broken(path, seq, "is not in canonical form")
    if not isinstance(event.data, dict) or not isinstance(event.type, str) or not isinstance(event.time, str):
        raise _broken(path, seq, "is not a ledger event")
    if event.seq != seq or type(event.seq) is not int:
        raise _broken(path, seq, f"has sequence number {event.seq}")
    return event


def _starts_a_run(event: LedgerEvent) -> bool:
    is_known = event.type == "run_started" and event.data.get("policy") == POLICY
    return is_known and isinstance(event.data.get("run_id"), str)


def _broken(path: Path, seq: int, what: str) -> LedgerError:
    return LedgerError(f"ledger line {seq + 1} {what}", given=str(path), fix="Restore the ledger or start a new run")


def _lock(stream: IO[bytes], run_dir: Path) -> None:
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(
            "another process is working on this run", given=str(run_dir), fix="Wait for it or use another folder"
        ) from None


def _drop_torn_line(stream: IO[bytes]) -> None:
    stream.seek(0)
    content = stream.read()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.ftruncate(stream.fileno(), whole)
