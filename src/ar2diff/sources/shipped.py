"""The mask-gated adapters that come inside this package: a folder each, with a receipt of every file's digest.

An adapter's folder holds what `ar2diff export --to adapter` wrote, `receipt.json`, and the ledger and the model card
of the run that trained it; `pipelines/ship.py` makes it.
"""

from pathlib import Path
from typing import Any

from ar2diff.errors import ConfigError, SourceError
from ar2diff.files import read_json
from ar2diff.hashing import sha256_file

SHIPPED_PREFIX = "shipped:"
SHIPPED_DIR = Path(__file__).parents[1] / "shipped"
RECEIPT_NAME = "receipt.json"


def list_shipped() -> list[str]:
    """The names of the adapters that this package has."""
    return sorted(path.parent.name for path in SHIPPED_DIR.glob(f"*/{RECEIPT_NAME}"))


def find_shipped(name: str) -> Path:
    """The folder of a shipped adapter, after every file's digest was checked.

    Raises:
        ConfigError: this package has no adapter of that name; the message lists those there are.
        SourceError: a file is missing or was changed.
    """
    known = list_shipped()
    if name not in known:
        there = f"Name one of {', '.join(known)}" if known else "Name a folder as local:PATH"
        raise ConfigError("no adapter of that name comes with this package", given=name, fix=there)
    folder = SHIPPED_DIR / name
    for file, digest in read_shipped_receipt(folder)["files"].items():
        if not (folder / file).is_file() or sha256_file(folder / file) != digest:
            raise SourceError(f"{file} of a shipped adapter is missing or was changed", given=name, fix=_INSTALL)
    return folder


def read_shipped_receipt(folder: Path) -> dict[str, Any]:
    """The receipt of a shipped adapter; see `pipelines/ship.py` for its fields.

    Raises:
        SourceError: it cannot be read.
    """
    receipt = read_json(folder / RECEIPT_NAME, error=SourceError)
    if not isinstance(receipt, dict) or not isinstance(receipt.get("files"), dict):
        raise SourceError("the receipt of a shipped adapter lists no files", given=folder.name, fix=_INSTALL)
    return receipt


_INSTALL = "Install ar2diff again"
