"""What a data run counts and returns."""

from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ar2diff.data.config import SourceShare
from ar2diff.data.locate import describe_files
from ar2diff.errors import ConfigError
from ar2diff.tasks.table import find_task


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of several machines that share the parts: `index` from 0 to `count - 1`."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            fix = "Write 0/2 and 1/2 for two machines"
            raise ConfigError("no such node", given=f"{self.index}/{self.count}", fix=fix)

    @classmethod
    def parse(cls, text: str) -> "Node":
        """Read `INDEX/COUNT`."""
        index, _, count = text.partition("/")
        if not (index.isascii() and index.isdigit() and count.isascii() and count.isdigit()):
            raise ConfigError("not a node", given=text, fix="Write 0/2 and 1/2 for two machines")
        return cls(index=int(index), count=int(count))


class SourceCount:
    """Rows of one source by what became of them."""

    def __init__(self, share: SourceShare, files: list[Path]) -> None:
        self.share = share
        self.files = files
        self._described = describe_files(files)
        self.kept = 0
        self.rows = 0
        self.num_tokens = 0
        self.dropped: Counter[str] = Counter()

    def as_json(self) -> dict[str, Any]:
        """The source's entry in the receipt."""
        entry: dict[str, Any] = {"source": self.share.source, "rows": self.rows, "documents": self.kept}
        entry |= {"tokens": self.num_tokens, "dropped": dict(sorted(self.dropped.items()))}
        return entry | self.describe()

    def describe(self) -> dict[str, Any]:
        """What decides the source's rows: versions of a generator, digests of files."""
        if self.share.is_procedural:
            task = find_task(self.share.task_name)
            libraries = {name: metadata.version(name) for name in task.libraries}
            return {"task_version": task.version, "libraries": libraries}
        return {"recipe": self.share.row_recipe, "files": self._described}
