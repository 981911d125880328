"""`ar2diff data show` and `ar2diff data report`: what is in a prepared data folder, for people to look at."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.text import Text

    from ar2diff.data.inspect import ShownDocument

BLOCK_SIGN = "│"
BLOCK_STYLES = ("black on green", "black on cyan")


def data(
    view: Literal["show", "report"],
    folder: Path,
    *,
    tokenizer: Path | None = None,
    start: int = 0,
    count: int = 3,
    block_size: int = 8,
    row_len: int | None = None,
    out: Path | None = None,
) -> None:
    """Look at a data folder: `show` prints documents, `report` writes an HTML page.

    Args:
        view: show or report.
        folder: What `ar2diff prepare` made.
        tokenizer: For show: the model folder whose tokenizer made the data.
        start: For show: the number of the first document.
        count: For show: how many documents.
        block_size: For show: tokens of a block.
        row_len: For report: the row length whose packing is shown.
        out: For report: the page, report.html in the folder's parent by default.
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
    print(write_report(folder, out, row_len=row_len))


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
