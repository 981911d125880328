"""`ar2diff prepare`: sources to a finished data folder, evaluation items kept out, every row accounted for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from ar2diff.data.config import DataConfig


def prepare(
    out: Path = Path("data"),
    *,
    tokenizer: Path = Path("base"),
    source: tuple[str, ...] = (),
    evaluation: tuple[str, ...] = (),
    blocklist: tuple[Path, ...] = (),
    fetched: tuple[Path, ...] = (),
    max_document_len: int | None = None,
    workers: int = 1,
    node: str | None = None,
) -> None:
    """Turn sources into token shards, without evaluation items, repeated prompts and documents that are too long.

    With no source named, the embedded mixture is made: text to structured output and short reasoning, no network.
    Repeat it at will: a finished folder of the same settings is kept, and a run that was stopped goes on from its
    finished parts. The files are the same for any number of workers and nodes.

    Args:
        out: The data folder to make; `ledger.jsonl` lies beside it.
        tokenizer: The model folder whose tokenizer and chat template are used.
        source: SOURCE[?count=N&start=N&recipe=NAME&thinking=drop]: procedural:structured, local:chat.jsonl, a fetched
            source, or parent:SOURCE, as it was given to `ar2diff answers`. Thinking is kept unless it is dropped.
        evaluation: TASK[?count=N&start=N&source=SOURCE]: held-out problems to keep out of the data; the source is
            where the rows of a published benchmark lie.
        blocklist: Chat files whose rows are kept out of the data, or .hashes.json files.
        fetched: Folders that `ar2diff fetch` and `ar2diff answers` made, for the hub, pypi and parent sources named.
        max_document_len: Longer documents, in tokens, are dropped.
        workers: How many processes work.
        node: INDEX/COUNT: make only this machine's parts, on a file system that all machines share. When all are
            done, run it once more without, to join them.
    """
    import uuid

    from rich.console import Console

    from ar2diff.cli.open_ledger import open_ledger
    from ar2diff.clock import SystemClock
    from ar2diff.data.pipeline import prepare as prepare_data
    from ar2diff.data.pipeline import prepare_parts
    from ar2diff.data.receipt import Node
    from ar2diff.tokenizer import Tokenizer

    config = build_config(source, evaluation, blocklist, max_document_len)
    folders = {read_fetched_source(folder): folder for folder in fetched}
    loaded = Tokenizer.from_folder(tokenizer)
    console = Console(stderr=True)
    with console.status("Preparing data") as status:

        def show(name: str, done: int, total: int | None) -> None:
            status.update(f"{name}: {done}" + (f" of {total}" if total else ""))

        options: dict[str, Any] = {"progress": show, "fetched": folders, "num_workers": workers}
        if node is not None:
            made = prepare_parts(config, loaded, out, node=Node.parse(node), **options)
            console.print(f"{made} parts made; join them without --node when every machine is done", highlight=False)
            return
        with open_ledger(out.absolute().parent, clock=SystemClock(), run_id=uuid.uuid4().hex) as ledger:
            receipt = prepare_data(config, loaded, out, ledger=ledger, **options)
    console.print(build_table(receipt.content))
    console.print(f"{receipt.num_documents} documents, {receipt.num_tokens} tokens in {out}", highlight=False)


def build_config(
    source: tuple[str, ...], evaluation: tuple[str, ...], blocklist: tuple[Path, ...], max_document_len: int | None
) -> "DataConfig":
    """The config of the flags; what no flag says is as in the embedded mixture."""
    from dataclasses import replace

    from ar2diff.data.config import EMBEDDED_MIXTURE, parse_evaluation_share, parse_source_share

    changes: dict[str, Any] = {"blocklist_files": tuple(str(path) for path in blocklist)}
    if source:
        changes["sources"] = tuple(parse_source_share(text) for text in source)
    if evaluation:
        changes["evaluation"] = tuple(parse_evaluation_share(text) for text in evaluation)
    if max_document_len is not None:
        changes["max_document_len"] = max_document_len
    return replace(EMBEDDED_MIXTURE, **changes)


def read_fetched_source(folder: Path) -> str:
    """The source's text in the receipt of a fetched folder.

    Raises:
        DataError: the folder has no receipt.
    """
    from ar2diff.errors import DataError
    from ar2diff.files import read_json

    receipt = read_json(folder / "receipt.json", error=DataError)
    if not isinstance(receipt, dict) or not isinstance(receipt.get("source"), str):
        raise DataError("not the receipt of a fetch", given=str(folder), fix="Fetch the source with `ar2diff fetch`")
    return str(receipt["source"])


def build_table(receipt: dict[str, Any]) -> "Table":
    """What became of the rows of each source."""
    from rich.table import Table

    table = Table(title="Prepared data")
    for name in ("source", "rows", "documents", "tokens"):
        table.add_column(name, justify="left" if name == "source" else "right")
    table.add_column("not used, by reason")
    for entry in receipt["sources"]:
        reasons = ", ".join(f"{reason}: {rows}" for reason, rows in entry["dropped"].items()) or "-"
        numbers = (str(entry[name]) for name in ("rows", "documents", "tokens"))
        table.add_row(entry["source"], *numbers, reasons)
    return table
