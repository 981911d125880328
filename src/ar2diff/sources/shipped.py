"""The mask-gated adapters that come inside this package: a folder each, with a receipt of every file's digest.

An adapter's folder holds what `ar2diff export --to adapter` wrote, `receipt.json`, and the ledger, its signed heads,
the model card and the evaluation of the run that trained it; `pipelines/ship.py` makes it.
"""

from pathlib import Path
from typing import Any, NamedTuple

from ar2diff.errors import ConfigError, SourceError
from ar2diff.files import PARTIAL_MARK, read_json
from ar2diff.hashing import sha256_file
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent, verify_ledger

SHIPPED_PREFIX = "shipped:"
SHIPPED_DIR = Path(__file__).parents[1] / "shipped"
RECEIPT_NAME = "receipt.json"
TRAINED_EVENT = "train_finished"
_INSTALL = "Install ar2diff again"


class ShippedAdapter(NamedTuple):
    """A shipped adapter: its folder, and the tensor root of the model that it makes of its base."""

    folder: Path
    tensor_root: str


def list_shipped() -> list[str]:
    """The names of the adapters that this package has."""
    names = sorted(path.parent.name for path in SHIPPED_DIR.glob(f"*/{RECEIPT_NAME}"))
    return [name for name in names if PARTIAL_MARK not in name]


def find_shipped(name: str) -> ShippedAdapter:
    """A shipped adapter by its name, after every file's digest was checked, and its root against the run's ledger.

    Raises:
        ConfigError: this package has no adapter of that name; the message lists those there are.
        SourceError: a file is missing, was changed or is not of the receipt, or the receipt names another model than
            the run's ledger.
        LedgerError: the ledger does not hold.
    """
    known = list_shipped()
    if name not in known:
        there = f"Name one of {', '.join(known)}" if known else "Name a folder as local:PATH"
        raise ConfigError("no adapter of that name comes with this package", given=name, fix=there)
    return verify_shipped(SHIPPED_DIR / name)


def verify_shipped(folder: Path) -> ShippedAdapter:
    """A shipped adapter by its folder; errors as in `find_shipped`."""
    receipt, name = read_shipped_receipt(folder), folder.name
    present = {path.name for path in folder.iterdir()} - {RECEIPT_NAME}
    if odd := sorted(present - set(receipt["files"])):
        raise SourceError(f"{odd[0]} of a shipped adapter is not in its receipt", given=name, fix=_INSTALL)
    for file, digest in receipt["files"].items():
        if file not in present or sha256_file(folder / file) != digest:
            raise SourceError(f"{file} of a shipped adapter is missing or was changed", given=name, fix=_INSTALL)
    root = find_trained_root(verify_ledger(folder / LEDGER_NAME, **receipt["ledger"]))
    if root is None or root != receipt["tensor_root"]:
        given = f"{receipt['tensor_root']} in the receipt, {root} in the ledger"
        raise SourceError("the receipt of a shipped adapter names another model", given=given, fix=_INSTALL)
    return ShippedAdapter(folder, root)


def find_trained_root(events: list[LedgerEvent]) -> str | None:
    """The tensor root that a ledger's last training ended with; None where none ended."""
    finished = [event for event in events if event.type == TRAINED_EVENT]
    return str(finished[-1].data["tensor_root"]) if finished else None


def read_shipped_receipt(folder: Path) -> dict[str, Any]:
    """The receipt of a shipped adapter; see `pipelines/ship.py` for its fields.

    Raises:
        SourceError: it cannot be read, or names no files or no model.
    """
    receipt = read_json(folder / RECEIPT_NAME, error=SourceError)
    ledger = receipt.get("ledger") if isinstance(receipt, dict) else None
    names_files = isinstance(receipt, dict) and isinstance(receipt.get("files"), dict)
    if not names_files or LEDGER_NAME not in receipt["files"]:
        raise SourceError("the receipt of a shipped adapter lists no files", given=folder.name, fix=_INSTALL)
    if "tensor_root" not in receipt or not isinstance(ledger, dict) or set(ledger) != {"size", "head"}:
        raise SourceError("the receipt of a shipped adapter names no model", given=folder.name, fix=_INSTALL)
    return dict(receipt)
