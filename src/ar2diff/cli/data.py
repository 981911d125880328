"""`ar2diff data`: `show` and `report` let people look at a prepared folder, `hash-items` writes a blocklist."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.text import Text

    from ar2diff.data.inspect import ShownDocument

BLOCK_SIGN = "│"
BLOCK_STYLES = ("black on green", "black on cyan")


def data(
    view: Literal["show", "report", "hash-items"],
    folder: Path,
    *,
    task: str | None = None,
    tokenizer: Path | None = None,
    start: int = 0,
    count: int = 3,
    block_size: int = 8,
    row_len: int | None = None,
    out: Path | None = None,
) -> None:
    """Look at a data folder: `show` prints documents, `report` writes an HTML page; `hash-items` hashes a blocklist.

    `hash-items` turns evaluation items into a .hashes.json file for `prepare --blocklist`, which holds no text: for
    items that must stay unpublished.

    Args:
        view: show, report or hash-items.
        folder: What `ar2diff prepare` made; for hash-items the file of the items.
        task: For hash-items: the benchmark whose rows these are, such as gpqa_diamond; a chat file where left out.
        tokenizer: For show: the model folder whose tokenizer made the data.
        start: For show: the number of the first document.
        count: For show: how many documents.
        block_size: For show: tokens of a block.
        row_len: For report: the row length whose packing is shown.
        out: For report: the page, report.html in the folder's parent by default. For hash-items: the file, beside
            the items by default.
    """
    from rich.console import Console

    from ar2diff.errors import ConfigError

    if view == "show":
        if tokenizer is None:
            raise ConfigError("no tokenizer to read the tokens with", fix="Name the model folder: --tokenizer")
        console = Console()
        for text in draw_documents(folder, tokenizer, start=start, count=count, block_size=block_size):
            console.print(text)
        return
    print(write_report(folder, out, row_len=row_len) if view == "report" else write_item_hashes(folder, task, out))


def draw_documents(folder: Path, tokenizer: Path, *, start: int, count: int, block_size: int) -> "Iterator[Text]":
    """The documents as coloured text."""
    from itertools import islice

    from ar2diff.data.inspect import read_documents
    from ar2diff.tokenizer import Tokenizer

    documents = read_documents(folder, Tokenizer.from_folder(tokenizer), block_size=block_size, start=start)
    for document in islice(documents, count):
        yield draw_document(document)


def draw_document(document: "ShownDocument") -> "Text":
    """Prompt dim, since it carries no loss; blocks of the response in two colours in turn, a line before each."""
    from rich.text import Text

    sizes = f"{document.prompt_len} prompt + {document.num_tokens - document.prompt_len} response tokens"
    text = Text(f"{document.source}  {sizes}\n", style="bold")
    text.append(document.prompt, style="not bold dim")
    for place, block in enumerate(document.blocks):
        text.append(BLOCK_SIGN, style="bold red")
        text.append(block, style=f"not bold {BLOCK_STYLES[place % 2]}")
    return text.append("\n")


def write_report(folder: Path, out: Path | None, *, row_len: int | None) -> Path:
    """Write the page; where it lies."""
    from ar2diff.data.report import build_report
    from ar2diff.files import write_text

    path = out or folder.absolute().parent / "report.html"
    write_text(path, build_report(folder, row_len=row_len))
    return path


def write_item_hashes(path: Path, task: str | None, out: Path | None) -> Path:
    """Write the blocklist of hashes; where it lies.

    Raises:
        ConfigError: `out` does not end in .hashes.json, so that `prepare` would take it for something else.
        DataError: the file is broken, or holds no rows of the task.
    """
    from ar2diff.data.config import ALL_ROWS, EvaluationShare
    from ar2diff.data.evaluation_items import hash_file, hash_items
    from ar2diff.data.hashed_items import HASHES_SUFFIX, write_hashes
    from ar2diff.errors import ConfigError

    target = out or path.with_name(path.name.partition(".")[0] + HASHES_SUFFIX)
    if not target.name.endswith(HASHES_SUFFIX):
        raise ConfigError("not a name for hashes", given=str(target), fix=f"End it in {HASHES_SUFFIX}")
    share = EvaluationShare(task=task, count=ALL_ROWS, source=f"local:{path}") if task else None
    write_hashes(target, hash_items(share, {}) if share else hash_file(path))
    return target
