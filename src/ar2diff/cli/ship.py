"""`make ship`: a finished run's adapter becomes part of the package.

It is for those who release the package, and so no command of the table: `python -m ar2diff.cli.ship RUN NAME`
"""

import sys
from pathlib import Path

from cyclopts import App

from ar2diff.cli import run as run_command


def ship(run: Path, name: str) -> None:
    """Put the adapter of a finished run into the package, with the run's ledger, signatures, card and figures.

    Args:
        run: The run directory.
        name: What the adapter is called: shipped:NAME.
    """
    from ar2diff.errors import SourceError
    from ar2diff.files import read_json
    from ar2diff.pipelines.ship import ship_adapter
    from ar2diff.sources import shipped

    folder = ship_adapter(run, name, shipped.SHIPPED_DIR)
    receipt = read_json(folder / shipped.RECEIPT_NAME, error=SourceError)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"wrote {folder}: {len(receipt['files']) + 1} files, {num_bytes:,} bytes")
    print(f"tensor root  {receipt['tensor_root']}")
    print(f"its base     {receipt['base_tensor_root']}")


def main(words: list[str]) -> int:
    """Run the command on its words; returns its exit code."""
    parser = App(name="ship", print_error=False, exit_on_error=False, result_action="return_value", version_flags=[])
    parser.default(ship)
    return run_command(words, parser=parser)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
