"""`prepare`: sources to one finished token shard, with a receipt that accounts for every row.

Rows are cut into parts that anyone can make (`parts`), by this process or by workers (`pool`); the parts are
joined in their fixed order. Order of the checks: what the recipe drops, then evaluation items, then repeated
prompts and near duplicates, then length. The same config and tokenizer give byte-identical files, whoever works.
"""

import glob
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from ar2diff import __version__
from ar2diff.data.config import DataConfig, SourceShare
from ar2diff.data.decontaminate import STRICT_POLICY
from ar2diff.data.dedup import Deduplicator, OpenPart, Repeat
from ar2diff.data.evaluation_items import build_blocklist, load_problems
from ar2diff.data.hashed_items import HASHED_POLICY
from ar2diff.data.locate import describe_files, locate_files, locate_share
from ar2diff.data.near_duplicates import NEAR_POLICY
from ar2diff.data.parts import Part, PartWork, plan_parts
from ar2diff.data.pool import Pool, open_pool
from ar2diff.data.procedural_overlap import PROCEDURAL_POLICY
from ar2diff.data.receipt import DataReceipt, Node, SourceCount
from ar2diff.data.shards import COMPLETE_NAME, ShardWriter, TokenShard, read_receipt
from ar2diff.errors import ConfigError, DataError, RequestError
from ar2diff.hashing import sha256_file, sha256_json
from ar2diff.provenance.ledger import Ledger, find_events
from ar2diff.tasks.table import find_task
from ar2diff.tokenizer import Tokenizer

__all__ = ["DataReceipt", "prepare", "prepare_parts"]

PARTS_MARK = ".parts-"
PREPARE_EVENT = "prepare"
# A generator that yields nothing but removed documents would otherwise never end.
MAX_ROWS_PER_DOCUMENT = 50

Progress = Callable[[str, int, int | None], None]


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    out_dir: Path,
    *,
    ledger: Ledger | None,
    progress: Progress | None,
    fetched: Mapping[str, Path] | None = None,
    num_workers: int = 1,
) -> DataReceipt:
    """Make `out_dir`, a finished token shard, and record it in the ledger.

    A finished `out_dir` of the same config and tokenizer is kept as it is, and recorded if the ledger lacks it.
    The files are the same for any number of workers. Finished parts lie beside `out_dir` until it is done, so a
    run that was killed goes on from them, and so does one after `prepare_parts` on several machines.

    Args:
        progress: called with a source's name, the documents kept of it, and how many are wanted.
        fetched: the folder of each downloaded source, by its text.
        num_workers: processes; 1 is this one.

    Raises:
        ConfigError: an unknown task or recipe.
        RunError: a worker was killed.
        DataError: a broken file, `out_dir` holds something else or was changed, or nothing is left.
    """
    asked = _describe_request(config, tokenizer)
    content = _reuse(out_dir, asked)
    if content is None:
        run = _Run(config, tokenizer, fetched or {}, progress)
        folder = run.parts_dir(out_dir, asked)
        with _removed_after_faults(folder):
            content = run.write(out_dir, folder, asked, num_workers)
    # Also those of a run that was killed just before this line, or that had another config.
    for parts in out_dir.parent.glob(f"{glob.escape(out_dir.name)}{PARTS_MARK}*"):
        shutil.rmtree(parts)
    _record(ledger, content)
    return DataReceipt(folder=out_dir, content=content)


def prepare_parts(
    config: DataConfig,
    tokenizer: Tokenizer,
    out_dir: Path,
    *,
    node: Node,
    progress: Progress | None,
    fetched: Mapping[str, Path] | None = None,
    num_workers: int = 1,
) -> int:
    """Make one node's share of the parts of `out_dir` on a shared file system; how many parts that is.

    `prepare` with the same arguments joins them, and makes those that are missing.

    Raises: as `prepare`.
    """
    asked = _describe_request(config, tokenizer)
    if _reuse(out_dir, asked) is not None:
        return 0
    run = _Run(config, tokenizer, fetched or {}, progress)
    return run.write_parts(run.parts_dir(out_dir, asked), node, num_workers)


@contextmanager
def _removed_after_faults(folder: Path) -> Iterator[None]:
    """Parts of a wrong file or config are of no further use; those of a run that was stopped are."""
    try:
        yield
    except (ConfigError, DataError, RequestError):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _describe_request(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"config": config.as_json(), "tokenizer": fingerprint_tokenizer(tokenizer)}


def fingerprint_tokenizer(tokenizer: Tokenizer) -> str:
    """SHA-256 of what decides token ids: vocabulary, template, end tokens, and how a sample is cut."""
    vocabulary = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)]
    sample = tokenizer.encode("It's 3.14 for a naïve    reader,\nisn't it? {\"a\": [1, null]}")
    return sha256_json([vocabulary, tokenizer.chat_template, list(tokenizer.eos_token_ids), sample])


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
    """One data run: its parts are made where they are missing, then joined into one shard."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, fetched: Mapping[str, Path], progress: Progress | None
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._fetched = fetched
        self._progress = progress
        self._counts = [SourceCount(share, locate_share(share, fetched)) for share in config.sources]
        self._problems = [load_problems(share, fetched) for share in config.evaluation]
        self._blocklist = build_blocklist(config, self._problems)
        self._removed: Counter[tuple[str, str, str]] = Counter()

    def parts_dir(self, out_dir: Path, asked: dict[str, Any]) -> Path:
        """The folder of the parts; its name changes with anything that could change a part."""
        evaluation = [
            describe_files(locate_files(share.source, self._fetched))
            for share in self._config.evaluation
            if share.source
        ]
        blocklist = [sha256_file(Path(name)) for name in self._config.blocklist_files]
        versions = [__version__, {name: metadata.version(name) for name in ("rapidfuzz", "rensa", "tokenizers")}]
        sources = [count.describe() for count in self._counts]
        digest = sha256_json([asked, sources, evaluation, blocklist, versions])
        return out_dir.with_name(f"{out_dir.name}{PARTS_MARK}{digest[:12]}")

    def write_parts(self, folder: Path, node: Node, num_workers: int) -> int:
        """Make the parts of one node; how many it has."""
        made = 0
        with self._open_pool(folder, num_workers) as pool:
            for order, count in enumerate(self._counts):
                works = _bound(plan_parts(count.share, count.files, order), count.share)
                for _ in pool.finish(islice(works, node.index, None, node.count)):
                    made += 1
                    self._report(f"{count.share.source}, parts", made, None)
        return made

    def write(self, out_dir: Path, folder: Path, asked: dict[str, Any], num_workers: int) -> dict[str, Any]:
        """Join all parts into the shard and return its receipt."""
        shutil.rmtree(folder / "index", ignore_errors=True)
        dedup = Deduplicator(folder / "index")
        with self._open_pool(folder, num_workers) as pool, ShardWriter(out_dir, scratch=folder / "shard") as writer:
            for order, count in enumerate(self._counts):
                self._join(count, pool.finish(plan_parts(count.share, count.files, order)), dedup, writer)
            if not writer.num_documents:
                raise DataError("no document is left to train on", fix="See the reasons: check sources and blocklist")
            content = self._build_receipt(writer, asked)
            if out_dir.exists():
                out_dir.rmdir()
            writer.finish(content)
        return content

    def _open_pool(self, folder: Path, num_workers: int) -> AbstractContextManager[Pool]:
        folder.mkdir(parents=True, exist_ok=True)
        return open_pool(
            self._config,
            self._tokenizer,
            self._blocklist,
            folder,
            fetched=self._fetched,
            num_workers=num_workers,
        )

    def _join(self, count: SourceCount, paths: Iterator[Path], dedup: Deduplicator, writer: ShardWriter) -> None:
        """Take the rows of a source in order until it has its documents."""
        share = count.share
        with closing(paths) as parts:  # type: ignore[type-var]
            for path in parts:
                self._join_part(Part(path), path, count, dedup, writer)
                if count.kept == share.count:
                    break
                if share.count and share.is_procedural and count.rows > MAX_ROWS_PER_DOCUMENT * share.count + 1000:
                    fix = "Lower its count, or raise max_document_len"
                    raise DataError("the generator has no more new documents", given=share.source, fix=fix)
        self._report(share.source, count.kept, share.count)

    def _join_part(
        self, part: Part, path: Path, count: SourceCount, dedup: Deduplicator, writer: ShardWriter
    ) -> None:
        documents = {int(place): index for index, place in enumerate(part.places)}
        opened = dedup.open(part, path)
        for place, entry in enumerate(part.entries):
            count.rows += 1
            if place in documents:
                self._place(part, documents[place], opened, count, writer)
            else:
                self._count_match(entry)
                _drop(entry, count, writer)
            if count.rows % 64 == 0:
                self._report(count.share.source, count.kept, count.share.count)
            if count.kept == count.share.count:
                break
        opened.close()

    def _place(self, part: Part, index: int, opened: OpenPart, count: SourceCount, writer: ShardWriter) -> None:
        """Add the document to the shard, or its record to the removed rows."""
        entry, length = part.entries[part.places[index]], int(part.lens[index])
        if (repeat := opened.find_earlier(index)) is not None:
            _drop(entry | _describe_repeat(repeat), count, writer)
        elif length > self._config.max_document_len:
            _drop(entry | {"tokens": length, "reason": "longer than max_document_len"}, count, writer)
        else:
            writer.add_tokens(entry["id"], entry["source"], part.token_ids(index), int(part.prompt_lens[index]))
            count.kept += 1
            count.num_tokens += length

    def _count_match(self, entry: dict[str, Any]) -> None:
        if "item" in entry:
            self._removed[entry["benchmark"], entry["policy"], entry["rule"]] += 1

    def _report(self, name: str, done: int, total: int | None) -> None:
        if self._progress:
            self._progress(name, done, total)

    def _build_receipt(self, writer: ShardWriter, asked: dict[str, Any]) -> dict[str, Any]:
        files = writer.finish_arrays()
        return asked | {
            "digest": sha256_json(files),
            "files": files,
            "num_documents": writer.num_documents,
            "num_tokens": writer.num_tokens,
            "eos_token_id": self._tokenizer.eos_token_ids[0],
            "sources": [count.as_json() for count in self._counts],
            "decontamination": self._describe_decontamination(),
            "near_duplicates": {"policy": NEAR_POLICY, "rensa": metadata.version("rensa")},
        }

    def _describe_decontamination(self) -> dict[str, Any]:
        return {
            "policies": [STRICT_POLICY, PROCEDURAL_POLICY, HASHED_POLICY],
            "num_items": self._blocklist.num_items,
            "evaluation": [
                {"task": share.task, "version": find_task(share.task).version, "items": len(problems)}
                for share, problems in zip(self._config.evaluation, self._problems, strict=True)
            ],
            "removed": [
                {"benchmark": benchmark, "policy": policy, "rule": rule, "rows": rows}
                for (benchmark, policy, rule), rows in sorted(self._removed.items())
            ],
        }


def _drop(entry: dict[str, Any], count: SourceCount, writer: ShardWriter) -> None:
    count.dropped[entry["reason"]] += 1
    writer.add_removed(entry)


def _describe_repeat(repeat: Repeat) -> dict[str, Any]:
    if repeat.similarity is None:
        return {"earlier": repeat.earlier, "reason": "repeated prompt"}
    # Rounded: the record says how alike the two are, not how a machine divides.
    return {"earlier": repeat.earlier, "similarity": round(repeat.similarity, 3), "reason": "near duplicate"}


def _bound(works: Iterator[PartWork], share: SourceShare) -> Iterator[PartWork]:
    """The parts that a source needs if every row becomes a document."""
    rows = 0
    for work in works:
        yield work
        rows += len(work.rows) if work.rows is not None else work.count
        if share.count is not None and rows >= share.count:
            return
