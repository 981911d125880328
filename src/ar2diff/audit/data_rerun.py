"""The data stage done again into a scratch folder, so that its results can be compared row by row."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import DATA_DIR, RunFiles, line_of, read_object
from ar2diff.data.config import DataConfig, EvaluationShare, SourceShare
from ar2diff.data.pipeline import fingerprint_tokenizer, prepare
from ar2diff.data.shards import RECEIPT_NAME, TokenShard
from ar2diff.errors import Ar2diffError
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent
from ar2diff.tasks.table import find_task
from ar2diff.tokenizer import Tokenizer

PREPARE_EVENT = "prepare"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecords:
    """What the run says of its data stage: the ledger's event and the receipt beside the shard."""

    event: LedgerEvent
    receipt: dict[str, Any]
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The stage done again, or why it cannot be."""

    folder: Path | None
    receipt: dict[str, Any] | None
    obstacle: str | None = None


def read_records(run: RunFiles, result: ClaimResult) -> DataRecords | None:
    """The run's data records; what is absent is noted in `result`."""
    event, folder = run.last(PREPARE_EVENT), run.folder / DATA_DIR
    if event is None:
        result.missing("a data stage", found_in=LEDGER_NAME)
        return None
    if not (folder / RECEIPT_NAME).is_file():
        result.missing("the prepared data", found_in=f"{DATA_DIR}/{RECEIPT_NAME}")
        return None
    return DataRecords(event=event, receipt=read_object(folder / RECEIPT_NAME), folder=folder)


def read_config(content: dict[str, Any]) -> DataConfig:
    """The data config that a prepare event holds.

    Raises:
        KeyError, TypeError, ConfigError: it is none.
    """
    config = content["config"]
    return DataConfig(
        sources=tuple(SourceShare(**share) for share in config["sources"]),
        evaluation=tuple(EvaluationShare(**share) for share in config["evaluation"]),
        blocklist_files=tuple(config["blocklist_files"]),
        max_document_len=config["max_document_len"],
    )


def find_tokenizer(run: RunFiles) -> Tokenizer | None:
    """The base's tokenizer, or the newest checkpoint's copy of it."""
    candidates = [path for path in (run.base_path(), *reversed(run.checkpoints())) if path and path.is_dir()]
    for folder in candidates:
        try:
            return Tokenizer.from_folder(folder)
        except Ar2diffError:
            continue
    return None


@contextmanager
def rerun_data(run: RunFiles) -> Iterator[Rerun]:
    """Prepare the data again from the run's own sources, under the config that the ledger holds."""
    event = run.last(PREPARE_EVENT)
    with tempfile.TemporaryDirectory(prefix="ar2diff-audit-") as scratch:
        if event is None:
            yield Rerun(folder=None, receipt=None, obstacle="no data stage in the ledger")
            return
        try:
            yield _rerun(run, event, Path(scratch) / DATA_DIR)
        except (Ar2diffError, KeyError, TypeError, ValueError, OSError) as error:
            yield Rerun(folder=None, receipt=None, obstacle=f"{type(error).__name__}: {error}")


def find_first_difference(ours: Path, theirs: Path) -> str:
    """Which document of two shards differs first, in words."""
    try:
        one, two = TokenShard(ours), TokenShard(theirs)
    except (Ar2diffError, OSError, ValueError) as error:
        return f"not readable: {error}"
    for idx in range(min(len(one), len(two))):
        if _document(one, idx) != _document(two, idx):
            return f"document {idx} has other tokens"
    return f"{len(one)} documents where {len(two)} are made" if len(one) != len(two) else "the same documents"


def _document(shard: TokenShard, idx: int) -> tuple[bytes, int]:
    start, end = shard.document_offsets[idx], shard.document_offsets[idx + 1]
    return shard.token_ids[start:end].tobytes(), int(shard.prompt_lens[idx])


def _rerun(run: RunFiles, event: LedgerEvent, folder: Path) -> Rerun:
    config = read_config(event.data)
    if obstacle := _find_obstacle(run, event, config):
        return Rerun(folder=None, receipt=None, obstacle=obstacle)
    tokenizer = find_tokenizer(run)
    if tokenizer is None:
        return Rerun(folder=None, receipt=None, obstacle="no tokenizer in the base or a checkpoint")
    if fingerprint_tokenizer(tokenizer) != event.data.get("tokenizer"):
        return Rerun(folder=None, receipt=None, obstacle="the tokenizer is not the one of the data stage")
    made = prepare(config, tokenizer, folder, ledger=None, progress=None, fetched=run.fetched_folders())
    return Rerun(folder=folder, receipt=made.content)


def _find_obstacle(run: RunFiles, event: LedgerEvent, config: DataConfig) -> str | None:
    """Why the same rows cannot be expected here: another generator, or sources that are not retained."""
    fetched = run.fetched_folders()
    for share, entry in zip(config.sources, event.data.get("sources", []), strict=False):
        if not share.is_procedural:
            known = share.source in fetched or share.source.startswith("local:")
            if not known:
                return f"the files of {share.source} are not in the run ({line_of(event)})"
            continue
        task = find_task(share.task_name)
        if entry.get("task_version") != task.version:
            return f"{task.name} is version {task.version} here, {entry.get('task_version')} in the run"
        for name, version in (entry.get("libraries") or {}).items():
            if metadata.version(name) != version:
                return f"{name} is {metadata.version(name)} here, {version} in the run"
    return None
