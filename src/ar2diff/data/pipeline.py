"""`prepare`: sources to one finished token shard, with a receipt that accounts for every row.

Order of the checks: what the recipe drops, then evaluation items, then repeated prompts, then length. The same
config and tokenizer give byte-identical files in any process.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ar2diff.data.blocklist import BlocklistItem, Match
from ar2diff.data.config import DataConfig, SourceShare
from ar2diff.data.decontaminate import STRICT_POLICY, Decontaminator
from ar2diff.data.dedup import Deduplicator, ExactPromptDeduplicator
from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.locate import describe_files, locate_files, read_source
from ar2diff.data.procedural_overlap import PROCEDURAL_POLICY
from ar2diff.data.recipes.chat_jsonl import read_documents
from ar2diff.data.shards import COMPLETE_NAME, ShardWriter, TokenShard, read_receipt
from ar2diff.data.tokenize import tokenize_document
from ar2diff.errors import DataError
from ar2diff.hashing import sha256_json
from ar2diff.provenance.ledger import Ledger, find_events
from ar2diff.tasks.table import TASKS, find_task
from ar2diff.tokenizer import Tokenizer

PREPARE_EVENT = "prepare"
# A generator that yields nothing but removed documents would otherwise never end.
MAX_ROWS_PER_DOCUMENT = 50

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReceipt:
    """What `prepare` made: the folder, and the receipt stored in it."""

    folder: Path
    content: dict[str, Any]

    @property
    def num_documents(self) -> int:
        """Documents in the shard."""
        return int(self.content["num_documents"])

    @property
    def num_tokens(self) -> int:
        """Tokens in the shard."""
        return int(self.content["num_tokens"])

    @property
    def digest(self) -> str:
        """SHA-256 over the digests of all files of the shard."""
        return str(self.content["digest"])


class _Count:
    """Rows of one source by what became of them."""

    def __init__(self, share: SourceShare, files: list[Path]) -> None:
        self.share = share
        self.files = files
        self.kept = 0
        self.rows = 0
        self.num_tokens = 0
        self.dropped: Counter[str] = Counter()

    def as_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"source": self.share.source, "rows": self.rows, "documents": self.kept}
        entry |= {"tokens": self.num_tokens, "dropped": dict(sorted(self.dropped.items()))}
        if self.share.is_procedural:
            task = find_task(self.share.task_name)
            entry["task_version"] = task.version
            entry["libraries"] = {name: metadata.version(name) for name in task.libraries}
        else:
            entry |= {"recipe": self.share.recipe, "files": describe_files(self.files)}
        return entry


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    out_dir: Path,
    *,
    ledger: Ledger | None,
    progress: Progress | None,
    fetched: Mapping[str, Path] | None = None,
) -> DataReceipt:
    """Make `out_dir`, a finished token shard, and record it in the ledger.

    A finished `out_dir` of the same config and tokenizer is kept as it is, and recorded if the ledger lacks it.

    Args:
        progress: called with a source's name, the documents kept of it, and how many are wanted.
        fetched: the folder of each downloaded source, by its text.

    Raises:
        ConfigError: an unknown task or recipe.
        DataError: a broken file, `out_dir` holds something else or was changed, or nothing is left to train on.
    """
    asked = {"config": config.as_json(), "tokenizer": fingerprint_tokenizer(tokenizer)}
    content = _reuse(out_dir, asked)
    if content is None:
        content = _Run(config, tokenizer, fetched or {}, progress).write(out_dir, asked)
    _record(ledger, content)
    return DataReceipt(folder=out_dir, content=content)


def fingerprint_tokenizer(tokenizer: Tokenizer) -> str:
    """SHA-256 of what decides token ids: vocabulary, template, end tokens, and how a sample is cut."""
    vocabulary = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)]
    sample = tokenizer.encode("It's 3.14 for a naïve    reader,\nisn't it? {\"a\": [1, null]}")
    return sha256_json([vocabulary, tokenizer.chat_template, list(tokenizer.eos_token_ids), sample])


def build_blocklist(config: DataConfig) -> Decontaminator:
    """The decontaminator of a config's evaluation problems and blocklist files."""
    items: list[BlocklistItem] = []
    for share in config.evaluation:
        task = find_task(share.task)
        problems = task.build_problems(split="eval", count=share.count, start=share.start)
        items += [BlocklistItem.from_problem(problem, procedural=task.procedural) for problem in problems]
    for name in config.blocklist_files:
        path = Path(name)
        rows = (row for row in read_documents(path, path.name) if isinstance(row, Document))
        items += [BlocklistItem.from_document(row, path.name) for row in rows]
    return Decontaminator(items, template_texts=[t for task in TASKS.values() for t in task.template_texts()])


def _reuse(out_dir: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    if not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir())):
        return None
    if not (out_dir / COMPLETE_NAME).is_file():
        raise DataError("the folder holds something else", given=str(out_dir), fix="Choose another folder")
    content = read_receipt(out_dir)
    if any(content.get(key) != value for key, value in asked.items()):
        fix = "Choose another folder, or remove this one"
        raise DataError("the folder holds data of another config or tokenizer", given=str(out_dir), fix=fix)
    TokenShard(out_dir).verify()
    return content


def _record(ledger: Ledger | None, content: dict[str, Any]) -> None:
    if ledger is None:
        return
    known = {event.data["digest"] for event in find_events(ledger.path, PREPARE_EVENT)}
    if content["digest"] not in known:
        ledger.append(PREPARE_EVENT, content)


class _Run:
    """One pass over all sources into one shard."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, fetched: Mapping[str, Path], progress: Progress | None
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._progress = progress
        self._counts = [
            _Count(share, [] if share.is_procedural else locate_files(share.source, fetched))
            for share in config.sources
        ]
        self._blocklist = build_blocklist(config)
        self._dedup: Deduplicator = ExactPromptDeduplicator()
        self._removed: Counter[tuple[str, str, str]] = Counter()

    def write(self, out_dir: Path, asked: dict[str, Any]) -> dict[str, Any]:
        """Write the shard and return its receipt."""
        with ShardWriter(out_dir) as writer:
            for count in self._counts:
                self._read(count, writer)
            if not writer.num_documents:
                raise DataError("no document is left to train on", fix="See the reasons: check sources and blocklist")
            content = self._build_receipt(writer, asked)
            if out_dir.exists():
                out_dir.rmdir()
            writer.finish(content)
        return content

    def _read(self, count: _Count, writer: ShardWriter) -> None:
        share = count.share
        for row in read_source(share, count.files):
            count.rows += 1
            self._place(row, count, writer)
            if self._progress and count.rows % 64 == 0:
                self._progress(share.source, count.kept, share.count)
            if count.kept == share.count:
                break
            if share.count and share.is_procedural and count.rows > MAX_ROWS_PER_DOCUMENT * share.count + 1000:
                fix = "Lower its count, or raise max_document_len"
                raise DataError("the generator has no more new documents", given=share.source, fix=fix)
        if self._progress:
            self._progress(share.source, count.kept, share.count)

    def _place(self, row: Document | DroppedRow, count: _Count, writer: ShardWriter) -> None:
        """Add the row to the shard, or its record to the removed ones."""
        entry = {"id": row.id, "source": row.source}
        if isinstance(row, DroppedRow):
            self._drop(row.reason, entry, count, writer)
        elif (match := self._blocklist.find(row)) is not None:
            self._removed[match.benchmark, match.policy, match.rule] += 1
            self._drop("evaluation item", entry | _match_json(match), count, writer)
        elif (earlier := self._dedup.find_earlier(row)) is not None:
            self._drop("repeated prompt", entry | {"earlier": earlier}, count, writer)
        else:
            self._add(row, entry, count, writer)

    def _add(self, document: Document, entry: dict[str, Any], count: _Count, writer: ShardWriter) -> None:
        tokenized = tokenize_document(document, self._tokenizer)
        length = len(tokenized.token_ids)
        if length > self._config.max_document_len:
            self._drop("longer than max_document_len", entry | {"tokens": length}, count, writer)
            return
        writer.add(document, tokenized)
        count.kept += 1
        count.num_tokens += length

    def _drop(self, reason: str, entry: dict[str, Any], count: _Count, writer: ShardWriter) -> None:
        count.dropped[reason] += 1
        writer.add_removed(entry | {"reason": reason})

    def _build_receipt(self, writer: ShardWriter, asked: dict[str, Any]) -> dict[str, Any]:
        files = writer.finish_arrays()
        return asked | {
            "digest": sha256_json(files),
            "files": files,
            "num_documents": writer.num_documents,
            "num_tokens": writer.num_tokens,
            "eos_token_id": self._tokenizer.eos_token_ids[0],
            "sources": [count.as_json() for count in self._counts],
            "decontamination": {
                "policies": [STRICT_POLICY, PROCEDURAL_POLICY],
                "num_items": self._blocklist.num_items,
                "evaluation": [
                    {"task": share.task, "version": find_task(share.task).version, "items": share.count}
                    for share in self._config.evaluation
                ],
                "removed": [
                    {"benchmark": benchmark, "policy": policy, "rule": rule, "rows": rows}
                    for (benchmark, policy, rule), rows in sorted(self._removed.items())
                ],
            },
        }


def _match_json(match: Match) -> dict[str, str]:
    return {"item": match.item_id, "policy": match.policy, "rule": match.rule, "gram": match.gram}
