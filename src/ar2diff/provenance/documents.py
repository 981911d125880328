"""The documents of a run: generated from the ledger, never written by hand, and checked by re-rendering.

Rendering is pure: the same events give the same bytes, on any machine.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from ar2diff.errors import LedgerError
from ar2diff.files import write_text
from ar2diff.provenance.bom import BOM_NAME, render_bom
from ar2diff.provenance.card import CARD_NAME, render_card
from ar2diff.provenance.croissant import CROISSANT_NAME, render_croissant
from ar2diff.provenance.environment import APPLIED_EVENT
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent, read_ledger

DOWNLOADS_NAME = "DOWNLOADS.md"
ARCHITECTURE_NAME = "architecture.json"
MODEL_FIELDS = ("base", "mask_token", "mask_token_id", "block_size", "shift_logits", "objective", "engine")


class Difference(NamedTuple):
    """One line of a document that does not follow from the ledger; None where a side has no such line."""

    document: str
    line: int
    expected: str | None
    found: str | None


def render_downloads(events: Iterable[LedgerEvent]) -> str:
    """DOWNLOADS.md: a table of the files of every `fetch` event, in ledger order; then those of a stored adapter."""
    events = list(events)
    fetches = [event for event in events if event.type == "fetch"]
    lines = [
        "# Downloads",
        "",
        "Generated from ledger.jsonl. Sizes are in bytes; times are UTC; line is the line of the ledger.",
    ]
    for event in fetches:
        lines += ["", *_fetch_lines(event)]
    if not fetches:
        lines += ["", "Nothing was downloaded."]
    for event in events:
        if event.type == APPLIED_EVENT:
            lines += ["", *_adapter_lines(event)]
    return "\n".join(lines) + "\n"


def render_architecture(events: Iterable[LedgerEvent]) -> str:
    """architecture.json: what was built from what, from whichever stages have been logged so far.

    A field of `MODEL_FIELDS` takes the last stage's value that names it; a field that no stage names is null.
    """
    events = list(events)
    stages = {kind: [event.data for event in events if event.type == kind] for kind in _STAGES}
    document: dict[str, Any] = {
        "run_id": next((e.data.get("run_id") for e in events if e.type == "run_started"), None)
    }
    for name in MODEL_FIELDS:
        document[name] = _last_value(name, [event.data for event in events if event.type in _STAGES])
    document["downloads"] = [_download(data) for data in stages["fetch"]]
    if applied := [event.data for event in events if event.type == APPLIED_EVENT]:
        document["adapters"] = applied
    document["data"] = stages["prepare"]
    document["training"] = {"started": stages["train_started"], "finished": stages["train_finished"]}
    document["evaluations"] = stages["evaluate"]
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n"


def write_downloads(run_dir: Path) -> Path:
    """Render DOWNLOADS.md of a run from its ledger; returns its path."""
    return _write_document(run_dir, DOWNLOADS_NAME)


def write_architecture(run_dir: Path) -> Path:
    """Render architecture.json of a run from its ledger; returns its path."""
    return _write_document(run_dir, ARCHITECTURE_NAME)


def write_all_documents(run_dir: Path) -> tuple[Path, ...]:
    """Render every document of a run from its ledger; returns their paths."""
    return tuple(_write_document(run_dir, name) for name in RENDERERS)


def verify_documents(run_dir: Path) -> list[Difference]:
    """Render all documents anew and compare: the lines that differ, none if all is as the ledger says.

    A document that is absent differs in one line, its first; some may be absent (`OPTIONAL_DOCUMENTS`).

    Raises:
        LedgerError: the ledger itself does not hold, or is absent.
    """
    differences = []
    for name, render in RENDERERS.items():
        expected = render(_read_events(run_dir))
        path = run_dir / name
        if name in OPTIONAL_DOCUMENTS and not path.is_file():
            continue
        if not path.is_file():
            differences.append(Difference(name, 1, expected.splitlines()[0], None))
        else:
            differences += _compare(name, expected.encode(), path.read_bytes())
    return differences


_STAGES = ("fetch", "prepare", "train_started", "train_finished", "evaluate")
RENDERERS: dict[str, Callable[[Sequence[LedgerEvent]], str]] = {
    DOWNLOADS_NAME: render_downloads,
    ARCHITECTURE_NAME: render_architecture,
    CARD_NAME: render_card,
    BOM_NAME: render_bom,
    CROISSANT_NAME: render_croissant,
}
OPTIONAL_DOCUMENTS = frozenset({CARD_NAME, BOM_NAME, CROISSANT_NAME})
"""Runs of earlier versions do not have them."""


def _fetch_lines(event: LedgerEvent) -> list[str]:
    data = event.data
    lines = [f"## {_cell(data.get('source'))}", ""]
    if data.get("resolved_from"):
        lines += [f"Resolved from `{_cell(data['resolved_from'])}`.", ""]
    if data.get("cached"):
        lines += ["Already here: verified, not downloaded again.", ""]
    if not data.get("files"):
        return [*lines, f"No files: made anew from the pinned generator. Line {event.seq + 1}, {event.time}."]
    lines += ["| file | bytes | sha256 | status | when | line |", "|---|---:|---|---|---|---:|"]
    for file in data["files"]:
        cells = (_cell(file["path"]), f"{file['size_bytes']:,}", file["sha256"], _status(file), event.time)
        lines.append("| " + " | ".join(cells) + f" | {event.seq + 1} |")
    total = sum(file["size_bytes"] for file in data["files"])
    return [*lines, "", f"{len(data['files'])} files, {total:,} bytes."]


def _adapter_lines(event: LedgerEvent) -> list[str]:
    data = event.data
    lines = [
        f"## {_cell(data.get('source'))}",
        "",
        "Not downloaded: a stored adapter, put on the base. Training began at what came out.",
        "",
        "| file | sha256 | when | line |",
        "|---|---|---|---:|",
    ]
    files = sorted((data.get("files") or {}).items())
    return lines + [f"| {_cell(name)} | {digest} | {event.time} | {event.seq + 1} |" for name, digest in files]


def _status(file: dict[str, Any]) -> str:
    status = f"HTTP {file['status']}" if file.get("status") else "no HTTP"
    return f"{status}, from the cache" if file.get("from_cache") else status


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("\\", "\\\\").replace("|", "\\|")


def _download(data: dict[str, Any]) -> dict[str, Any]:
    files = data.get("files", [])
    sizes = sum(file["size_bytes"] for file in files)
    named = {name: data.get(name) for name in ("source", "kind", "revision", "resolved_from", "folder", "tree")}
    return named | {"num_files": len(files), "size_bytes": sizes}


def _last_value(name: str, stages: list[dict[str, Any]]) -> Any:
    return next((data[name] for data in reversed(stages) if name in data), None)


def _write_document(run_dir: Path, name: str) -> Path:
    write_text(run_dir / name, RENDERERS[name](_read_events(run_dir)))
    return run_dir / name


def _read_events(run_dir: Path) -> list[LedgerEvent]:
    path = run_dir / LEDGER_NAME
    if not path.is_file():
        raise LedgerError("the run has no ledger", given=str(path), fix="Name the folder of a run")
    return list(read_ledger(path))


def _compare(name: str, expected: bytes, found: bytes) -> list[Difference]:
    # Bytes, so that no two texts look alike; split at newlines alone, so that a missing final newline differs too.
    lines = zip_longest(expected.split(b"\n"), found.split(b"\n"))
    return [
        Difference(name, number, _show(wanted), _show(had))
        for number, (wanted, had) in enumerate(lines, start=1)
        if wanted != had
    ]


def _show(line: bytes | None) -> str | None:
    return None if line is None else line.decode("utf-8", "backslashreplace")
