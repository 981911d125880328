"""A1, A2, A4: which bytes came from where, that they came before they were used, and that none is a pickle."""

from pathlib import Path
from typing import Any

from ar2diff.audit.claims.answers import check_answers_before
from ar2diff.audit.formats import find_format_fault
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import BASE_DIR, SOURCES_DIR, START_DIR, RunFiles, line_of, read_object
from ar2diff.errors import Ar2diffError
from ar2diff.hashing import sha256_json
from ar2diff.provenance.environment import STAGE_EVENT, STAGES
from ar2diff.provenance.git_objects import FileDigest, digest_file, object_id, prove_file, write_pointer
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent
from ar2diff.sources.git_fetch import OBJECTS_NAME, read_git_objects
from ar2diff.sources.receipt import RECEIPT_NAME
from ar2diff.sources.spec import HubSource, LocalSource, PypiSource, Source, is_inside, parse_source

FETCH_EVENT = "fetch"


def check_pins(run: RunFiles, result: ClaimResult) -> None:
    """A1: every file of every fetched source is the one that its pin means."""
    fetches = run.find(FETCH_EVENT)
    if not any(event.data.get("folder") == BASE_DIR for event in fetches):
        result.missing("a fetch of the base model", found_in=LEDGER_NAME)
    levels = set()
    for event in fetches:
        _check_pin_text(event, result)
    for event in _newest_by_source(fetches):
        folder = run.find_folder(str(event.data.get("source")), str(event.data.get("folder")))
        files = [file for file in event.data.get("files", []) if isinstance(file, dict)]
        receipt = _check_receipt(run, folder, event, result)
        digests = {str(file.get("path")): _check_file(run, folder, file, event, result) for file in files}
        _check_nothing_else(run, folder, set(digests), result)
        levels.add(_check_pin(folder, event, receipt, {k: v for k, v in digests.items() if v}, result))
    result.level = "; ".join(sorted(level for level in levels if level))


def check_order(run: RunFiles, result: ClaimResult) -> None:
    """A2: every source was fetched, with a retained answer, before the stage that used it."""
    fetches = run.find(FETCH_EVENT)
    first_training = next(iter(run.find("train_started")), None)
    if first_training is not None:
        base = [event for event in fetches if event.data.get("folder") == BASE_DIR]
        _check_before("the base was fetched before training", base, first_training, result)
    for prepared in run.find("prepare")[:1]:
        for entry in prepared.data.get("sources", []):
            source = str(entry.get("source"))
            if source.startswith("parent:"):
                check_answers_before(run, source, prepared, result)
            elif not source.startswith("procedural:"):
                used = [event for event in fetches if _names(event, source)]
                _check_before(f"{source} was fetched before the data was prepared", used, prepared, result)
    for event in fetches:
        _check_answers(event, fetches, result)
    fetched = {str(event.data.get("folder")) for event in fetches}
    for folder in (run.folder / BASE_DIR, *sorted((run.folder / SOURCES_DIR).glob("*"))):
        if folder.is_dir() and folder.name not in fetched:
            result.fail("every download has its log", "files without a fetch event", found_in=run.name(folder))


def check_formats(run: RunFiles, result: ClaimResult) -> None:
    """A4: every input has an allowed format by name and by content, and nothing in the run is a pickle."""
    # A stored adapter comes from elsewhere too.
    adapter = () if run.applied() is None else (START_DIR,)
    inputs = {
        path
        for folder in (BASE_DIR, SOURCES_DIR, *adapter)
        for path in (run.folder / folder).rglob("*")
        if path.is_file() or path.is_symlink()
    }
    if not inputs:
        result.missing("input files", found_in=BASE_DIR)
    for path in sorted(inputs):
        fault = find_format_fault(path, strict=True)
        result.holds(
            "an allowed format, by name and content",
            fault is None,
            claimed="allow-list",
            claimed_in="audit/formats.py",
            found=fault or "as its name says",
            found_in=run.name(path),
        )
    others = [p for p in sorted(run.folder.rglob("*")) if p.is_file() and p not in inputs]
    for path in others:
        if (fault := find_format_fault(path, strict=False)) is not None:
            result.fail("nothing in the run is a pickle", fault, found_in=run.name(path))
    _check_unpickled(run, result)


def _check_unpickled(run: RunFiles, result: ClaimResult) -> None:
    """Each stage's own record of the classes that its process had unpickled."""
    around = {event.seq + 1: event for event in run.find(STAGE_EVENT)}
    for stage in (event for event in run.events if event.type in STAGES):
        told = around.get(stage.seq)
        if told is None or "unpickled" not in told.data:
            result.missing("what the stage's process had unpickled", found=stage.type, found_in=line_of(stage))
        else:
            here = {"claimed_in": "claim", "found_in": line_of(told)}
            result.equal(f"classes unpickled up to {stage.type}", [], told.data["unpickled"], **here)


def _newest_by_source(fetches: list[LedgerEvent]) -> list[LedgerEvent]:
    return list({(str(e.data.get("source")), str(e.data.get("folder"))): e for e in fetches}.values())


def _names(event: LedgerEvent, source: str) -> bool:
    data = event.data
    asked = str(data.get("source")).replace(f"@{data.get('revision')}", f"@{data.get('resolved_from')}")
    return source in (data.get("source"), asked)


def _check_receipt(run: RunFiles, folder: Path, event: LedgerEvent, result: ClaimResult) -> dict[str, Any] | None:
    path = folder / RECEIPT_NAME
    if not path.is_file():
        result.missing("the fetch's receipt", found_in=run.name(path))
        return None
    receipt = read_object(path)
    tree = receipt.get("tree") or []
    listing = {"entries": len(tree), "sha256": sha256_json(tree)} if tree else None
    where = {"claimed_in": line_of(event), "found_in": run.name(path)}
    result.equal("listing of the repository", event.data.get("tree"), listing, **where)
    for name in ("source", "revision", "resolved_from"):
        result.equal(f"{name} of the fetch", event.data.get(name), receipt.get(name), **where)
    same = sha256_json(event.data.get("files")) == sha256_json(receipt.get("files"))
    result.equal(
        "files, addresses and answers in the receipt", "as logged", "as logged" if same else "others", **where
    )
    return receipt


def _check_file(
    run: RunFiles, folder: Path, file: dict[str, Any], event: LedgerEvent, result: ClaimResult
) -> FileDigest | None:
    path = folder / str(file.get("path"))
    if not is_inside(str(file.get("path"))):
        result.fail("a file lies inside its folder", str(file.get("path")), found_in=line_of(event))
        return None
    if not path.is_file():
        result.missing("a fetched file", found_in=run.name(path))
        return None
    where = {"claimed_in": line_of(event), "found_in": run.name(path)}
    # Size first: reading a file of another size to its end, such as a sparse one of terabytes, would show no more.
    if not result.equal("size in bytes", file.get("size_bytes"), path.stat().st_size, **where):
        return None
    digest = digest_file(path)
    result.equal("sha256", file.get("sha256"), digest.sha256, **where)
    return digest


def _check_nothing_else(run: RunFiles, folder: Path, known: set[str], result: ClaimResult) -> None:
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {
        RECEIPT_NAME,
        OBJECTS_NAME,
    }
    for path in sorted(found - known):
        result.fail("the folder holds what was fetched, and nothing else", path, found_in=run.name(folder))


def _check_pin(
    folder: Path,
    event: LedgerEvent,
    receipt: dict[str, Any] | None,
    digests: dict[str, FileDigest],
    result: ClaimResult,
) -> str:
    """Compare with the pin; returns the level of evidence in words."""
    where = line_of(event)
    match _parse(event):
        case HubSource() as source:
            return _check_repository(folder, source, receipt, digests, result)
        case PypiSource() as source:
            return _check_wheel(source, digests, result, where)
        case LocalSource() as source if source.sha256 is not None:
            found = [digest.sha256 for digest in digests.values()]
            result.equal("sha256 is the pin", [source.sha256], found, claimed_in=str(source), found_in=where)
            return "local file: pinned by sha256"
        case LocalSource():
            return "local file: known by its digest in the ledger alone"
        case _:
            return ""


def _parse(event: LedgerEvent) -> Source | None:
    try:
        return parse_source(str(event.data.get("source")))
    except Ar2diffError:
        return None


def _check_pin_text(event: LedgerEvent, result: ClaimResult) -> None:
    """A commit id, not a name that may come to mean other bytes."""
    source, where = _parse(event), line_of(event)
    if source is None:
        result.fail("the source is pinned", event.data.get("source"), found_in=where)
    elif isinstance(source, HubSource):
        found = event.data.get("revision")
        result.equal("revision is the pin", source.revision, found, claimed_in=str(source), found_in=where)


def _check_wheel(source: PypiSource, digests: dict[str, FileDigest], result: ClaimResult, where: str) -> str:
    pin = source.member_sha256 if source.member else source.sha256
    if pin is None:
        return "package index: the wheel was pinned and checked on arrival, it is not retained, its member has no pin"
    found = [digest.sha256 for digest in digests.values()]
    result.equal("sha256 is the pin", [pin], found, claimed_in=str(source), found_in=where)
    return "package index: the file's own sha256 is the pin"


def _check_repository(
    folder: Path,
    source: HubSource,
    receipt: dict[str, Any] | None,
    digests: dict[str, FileDigest],
    result: ClaimResult,
) -> str:
    objects = read_git_objects(folder)
    proved = source.revision in objects
    if proved:
        for path, digest in digests.items():
            proof = prove_file(source.revision, path, digest, objects)
            if proof.missing:
                result.missing(f"git object for {path}", found=proof.missing, found_in=OBJECTS_NAME)
            else:
                result.equal(
                    f"{path} is in the commit",
                    None,
                    proof.broken_at,
                    claimed_in=str(source),
                    found_in=OBJECTS_NAME,
                )
    tree = {str(entry.get("path")): entry for entry in (receipt or {}).get("tree", [])}
    for path, digest in digests.items():
        entry = tree.get(path)
        if entry is None:
            result.fail("the file is in the repository's listing", path, found_in=RECEIPT_NAME)
        elif entry.get("sha256"):
            pointer = object_id("blob", write_pointer(digest.sha256, digest.size_bytes))
            result.equal(f"git pointer of {path}", entry.get("oid"), pointer, claimed_in="listing", found_in=path)
        else:
            result.equal(f"git blob of {path}", entry.get("oid"), digest.blob_id, claimed_in="listing", found_in=path)
    if proved:
        return "hub: git objects up to the commit id"
    return "hub: the listing received for the commit (weaker: git objects are not retained)"


def _check_before(what: str, fetched: list[LedgerEvent], used: LedgerEvent, result: ClaimResult) -> None:
    if not fetched:
        result.fail(what, "no fetch event", found_in=LEDGER_NAME, claimed="fetched", claimed_in=line_of(used))
        return
    holds = fetched[0].seq < used.seq
    found_in, claimed_in = line_of(fetched[0]), line_of(used)
    result.holds(
        what, holds, claimed="earlier line", claimed_in=claimed_in, found=fetched[0].seq + 1, found_in=found_in
    )


def _check_answers(event: LedgerEvent, fetches: list[LedgerEvent], result: ClaimResult) -> None:
    data, where = event.data, line_of(event)
    if data.get("cached"):
        earlier = [e for e in fetches if e.seq < event.seq and not e.data.get("cached") and _is_same(e, event)]
        if not earlier:
            result.missing("the fetch that brought these files", found="already here", found_in=where)
        return
    for file in data.get("files", []):
        path, status = str(file.get("path")), file.get("status")
        if data.get("kind") != "hub" or file.get("size_bytes") == 0:
            logged = bool(file.get("sha256"))
            result.holds(
                "size and sha256 are logged", logged, claimed=path, claimed_in=where, found=path, found_in=where
            )
        elif status is None:
            # Also true of bytes from a cache that does not know any more who answered.
            result.missing(f"the server's answer for {path}", found="no status", found_in=where)
        else:
            known = status in (200, 206) and bool(file.get("url"))
            found = f"HTTP {status}, etag {file.get('etag')}"
            result.holds("the server's answer", known, claimed=path, claimed_in=where, found=found, found_in=where)


def _is_same(one: LedgerEvent, other: LedgerEvent) -> bool:
    return [f.get("sha256") for f in one.data.get("files", [])] == [
        f.get("sha256") for f in other.data.get("files", [])
    ]
