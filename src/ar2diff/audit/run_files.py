"""A run directory as the audit reads it: every line of the ledger that can be read, and files found by what they are.

Nothing here trusts the run: a broken chain, a torn line or a file of the wrong shape never stops the reading.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ar2diff.errors import Ar2diffError, RunError, SourceError
from ar2diff.hashing import sha256_bytes
from ar2diff.provenance.environment import APPLIED_EVENT
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent
from ar2diff.sources.receipt import RECEIPT_NAME, Receipt, read_receipt
from ar2diff.sources.spec import is_inside

BASE_DIR, DATA_DIR, SOURCES_DIR, CHECKPOINTS_DIR = "base", "data", "sources", "checkpoints"
ANSWERS_DIR = "answers"
AVERAGED_DIR, RELEASE_DIR, START_DIR = "averaged", "release", "start"


class AuditUsageError(RunError):
    """The audit was asked for something that is not there."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """A source's receipt and where its files lie, as a folder of the run."""

    folder: Path
    receipt: Receipt


class RunFiles:
    """Read access to one run.

    Raises:
        AuditUsageError: the folder is no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / LEDGER_NAME).is_file():
            raise AuditUsageError("not a run directory", given=str(folder), fix="Name a folder with a ledger.jsonl")

    @cached_property
    def events(self) -> list[LedgerEvent]:
        """Every line that is a ledger event, whether or not the chain holds."""
        return list(_read_lines(self.folder / LEDGER_NAME))

    def find(self, event_type: str) -> list[LedgerEvent]:
        """The events of one type, oldest first."""
        return [event for event in self.events if event.type == event_type]

    def last(self, event_type: str) -> LedgerEvent | None:
        """The newest event of one type."""
        found = self.find(event_type)
        return found[-1] if found else None

    @cached_property
    def sources(self) -> list[FetchedSource]:
        """Every folder with a readable receipt, the base's first."""
        candidates = [self.folder / BASE_DIR, *sorted((self.folder / SOURCES_DIR).glob("*"))]
        return [FetchedSource(folder, receipt) for folder in candidates if (receipt := _try_receipt(folder))]

    def find_folder(self, source: str, folder_name: str) -> Path:
        """Where the files of a fetch lie, by its receipt, else by its folder's name."""
        known = next((found.folder for found in self.sources if found.receipt.source == source), None)
        named = [self.folder / folder_name, self.folder / SOURCES_DIR / folder_name]
        return known or next((path for path in named if path.is_dir()), named[0])

    def fetched_folders(self) -> dict[str, Path]:
        """Folder by source text, both as pinned and as it was asked for."""
        folders: dict[str, Path] = {}
        for found in self.sources:
            receipt = found.receipt
            folders[receipt.source] = found.folder
            if receipt.revision and receipt.resolved_from:
                asked = receipt.source.replace(f"@{receipt.revision}", f"@{receipt.resolved_from}")
                folders[asked] = found.folder
        return folders | self.answer_folders()

    def answer_folders(self) -> dict[str, Path]:
        """Folders with answers of the parent, by source text."""
        folders: dict[str, Path] = {}
        for path in sorted((self.folder / ANSWERS_DIR).glob(f"*/{RECEIPT_NAME}")):
            try:
                source = read_object(path).get("source")
            except (OSError, ValueError):
                continue
            if isinstance(source, str):
                folders[source] = path.parent
        return folders

    def base_path(self) -> Path | None:
        """The base model: its folder, or the .gguf file in it; None where there is none."""
        folder = self.folder / BASE_DIR
        if not folder.is_dir():
            return None
        single = [] if (folder / "config.json").is_file() else sorted(folder.rglob("*.gguf"))
        return single[0] if len(single) == 1 else folder

    def applied(self) -> LedgerEvent | None:
        """The event of the adapter that was put on the base; None where training began at the base."""
        return self.last(APPLIED_EVENT)

    def start_path(self) -> Path | None:
        """The model that training began at: the base, or RUN/start; None where it is not there."""
        if self.applied() is None:
            return self.base_path()
        folder = self.folder / START_DIR
        return folder if folder.is_dir() else None

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders by name, complete or not; what a killed writer left is not one."""
        found = (self.folder / CHECKPOINTS_DIR).glob("step-*")
        return sorted(path for path in found if path.is_dir() and ".partial-" not in path.name)

    def latest_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step."""
        found = self.checkpoints()
        return found[-1] if found else None

    def models(self) -> list[Path]:
        """The folders that may be served: release, checkpoints from the newest, averaged, rounds; as far as there."""
        rounds = [str(event.data.get("checkpoint")) for event in self.find("on_policy_round")]
        found = [self.folder / RELEASE_DIR, *reversed(self.checkpoints()), self.folder / AVERAGED_DIR]
        found += [self.folder / name for name in rounds if is_inside(name)]
        return [path for path in found if path is not None and (path / "config.json").is_file()]

    def name(self, path: Path) -> str:
        """The path inside the run, so that a copied run gives the same report."""
        try:
            return path.relative_to(self.folder).as_posix()
        except ValueError:
            return path.name


def line_of(event: LedgerEvent) -> str:
    """How a report names a ledger line."""
    return f"{LEDGER_NAME} line {event.seq + 1} ({event.type})"


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileNotFoundError: it is absent.
        ValueError: it is no JSON object.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return content


def read_object_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a .jsonl file, one a line; errors as `read_object`."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not all(isinstance(line, dict) for line in lines):
        raise ValueError(f"{path.name} has a line that is no JSON object")
    return lines


def _read_lines(path: Path) -> Iterator[LedgerEvent]:
    for raw in path.read_bytes().split(b"\n"):
        try:
            body = json.loads(raw)
            event = LedgerEvent(
                body["seq"], body["prev"], body["time"], body["type"], body["data"], sha256_bytes(raw)
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(event.data, dict) and isinstance(event.type, str) and type(event.seq) is int:
            yield event._replace(time=str(event.time))


def _try_receipt(folder: Path) -> Receipt | None:
    try:
        return read_receipt(folder) if (folder / RECEIPT_NAME).is_file() else None
    except (Ar2diffError, SourceError, OSError, TypeError, AttributeError, ValueError):
        return None
