"""A run directory as the measuring commands open it: ledger, clock, progress on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ar2diff.pipelines.stages import RunContext


@contextmanager
def open_run(out: Path, *, device: str) -> Iterator["RunContext"]:
    """What a stage works with in `out`; its documents are written at the end."""
    from rich.console import Console

    from ar2diff.cli.allocator import keep_freed_memory
    from ar2diff.cli.fetch import default_library_dir
    from ar2diff.cli.open_ledger import open_ledger
    from ar2diff.cli.run_view import RunView
    from ar2diff.clock import SystemClock
    from ar2diff.pipelines.stages import RunContext, write_documents

    keep_freed_memory()
    clock = SystemClock()
    with open_ledger(out, clock=clock, run_id=out.resolve().name) as ledger, RunView(Console(stderr=True)) as view:
        yield RunContext(
            run_dir=out,
            cache_dir=out,
            library_dir=default_library_dir(),
            ledger=ledger,
            clock=clock,
            view=view,
            device=device,
        )
        write_documents(out)
