"""What a fetch leaves behind: which files, from where, with which digests. Kept as `receipt.json` beside them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ar2diff.errors import SourceError
from ar2diff.files import read_json, write_json
from ar2diff.sources.spec import is_inside

RECEIPT_NAME = "receipt.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEntry:
    """One line of a repository's listing: `oid` is the git id of the blob or tree, `sha256` that of LFS content."""

    path: str
    type: str
    oid: str
    size_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReceipt:
    """One file as it lies on disk; `url`, `etag`, `status` are those of the response that brought its bytes.

    `from_cache` says that this fetch found the bytes in the cache, verified them, and sent no request for them.
    """

    path: str
    size_bytes: int
    sha256: str
    url: str | None = None
    etag: str | None = None
    status: int | None = None
    from_cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One fetched source: canonical text, resolved revision and files, ordered by path.

    `resolved_from` is the branch, tag or short hash that was asked for, `tree` the whole listing of a repository.
    """

    source: str
    kind: str
    revision: str | None = None
    resolved_from: str | None = None
    files: tuple[FileReceipt, ...] = ()
    tree: tuple[TreeEntry, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back to an equal receipt."""
        content = asdict(self)
        return content | {"files": list(content["files"]), "tree": list(content["tree"])}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Receipt":
        """The receipt that `as_json` wrote.

        Raises:
            SourceError: it is not one, or it names a file outside its folder.
        """
        try:
            files = tuple(FileReceipt(**item) for item in content["files"])
            tree = tuple(TreeEntry(**item) for item in content["tree"])
            receipt = cls(**(content | {"files": files, "tree": tree}))
        except (KeyError, TypeError) as error:
            raise SourceError(f"not a receipt of a fetch: {error}", fix="Fetch the source again") from None
        for file in files:
            if not is_inside(file.path):
                raise SourceError("the receipt names a file outside its folder", given=file.path, fix="Fetch again")
        return receipt


def write_receipt(folder: Path, receipt: Receipt) -> None:
    """Write `receipt.json` into `folder`, whole or not at all."""
    write_json(folder / RECEIPT_NAME, receipt.as_json())


def read_receipt(folder: Path) -> Receipt | None:
    """The receipt of `folder`, or None where there is none.

    Raises:
        SourceError: the file is there and is not a receipt.
    """
    path = folder / RECEIPT_NAME
    return Receipt.from_json(read_json(path, error=SourceError)) if path.exists() else None
