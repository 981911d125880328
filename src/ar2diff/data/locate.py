"""Where the files of a source lie, and the documents that come from them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ar2diff.data.config import SourceShare
from ar2diff.data.documents import Document, DroppedRow
from ar2diff.data.recipes.parent import check_answers
from ar2diff.data.recipes.procedural import generate_documents
from ar2diff.data.recipes.table import RECIPES
from ar2diff.data.thinking import without_thinking
from ar2diff.errors import ConfigError, DataError
from ar2diff.hashing import sha256_file

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def locate_files(source: str, fetched: Mapping[str, Path]) -> list[Path]:
    """The data files of a source, sorted by path.

    Args:
        source: `local:<path>[#sha256=<hex>]`, or a source that is a key of `fetched`.
        fetched: the folder of each source that was downloaded.

    Raises:
        DataError: there is no such file, its digest differs, or the source was not fetched.
    """
    if source in fetched:
        return _list_folder(fetched[source])
    kind, _, rest = source.partition(":")
    if kind != "local":
        raise DataError("this source was not fetched", given=source, fix="Fetch it first: `ar2diff fetch`")
    text, _, digest = rest.partition("#sha256=")
    files = _list_folder(Path(text))
    if digest and [sha256_file(path) for path in files] != [digest]:
        raise DataError("the file's SHA-256 is not the one given", given=source, fix="Restore the file or pin anew")
    return files


def locate_share(share: SourceShare, fetched: Mapping[str, Path]) -> list[Path]:
    """The data files of a share: none where rows are generated; answers of a parent must be those it asks for.

    Raises:
        DataError: as `locate_files` and `check_answers`.
    """
    if share.is_procedural:
        return []
    if share.is_parent:
        if share.source not in fetched:
            fix = "Answer the prompts first: `ar2diff answers`, then name its folder with --fetched"
            raise DataError("there are no answers of a parent", given=share.source, fix=fix)
        check_answers(fetched[share.source], share)
    return locate_files(share.source, fetched)


def _list_folder(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.is_file())
    # A table beside data is about it; alone it is the data.
    files = [p for p in found if p.name.endswith(DATA_SUFFIXES)] or [p for p in found if p.suffix == ".csv"]
    if not files:
        fix = f"Give a file or folder with {', '.join(DATA_SUFFIXES)} or .csv"
        raise DataError("no data files", given=str(path), fix=fix)
    return files


def describe_files(files: list[Path]) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each file, for a receipt."""
    return [{"path": p.name, "size_bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in files]


def read_source(share: SourceShare, files: list[Path]) -> Iterator[Document | DroppedRow]:
    """All documents and dropped rows of a source, in a fixed order.

    Raises:
        ConfigError: the recipe or the task is unknown.
        DataError: a file is broken.
    """
    if share.is_procedural:
        yield from generate_documents(share.task_name, share.source, share.start)
        return
    if share.row_recipe not in RECIPES:
        raise ConfigError("unknown recipe", given=share.recipe, fix=f"Use one of: {', '.join(RECIPES)}")
    for path in files:
        prefix = share.source if len(files) == 1 else f"{share.source}/{path.name}"
        rows = RECIPES[share.row_recipe](path, prefix)
        yield from map(without_thinking, rows) if share.thinking == "drop" else rows
