"""A3: training began from exactly the base's tensors, or from exactly what a stored adapter makes of them."""

from pathlib import Path

from ar2diff.audit.claims.start import Start, find_start
from ar2diff.audit.claims.told import check_base_name, check_recipe
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of, read_object
from ar2diff.audit.tensor_files import TensorRoots, both_roots, list_tensors
from ar2diff.models.families.table import read_decoder_config
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent

RUN_NAME = "run.json"


def check_start(run: RunFiles, result: ClaimResult) -> None:
    """A3: the root of where training began, recomputed from files, is the one that it logged, as stored and live."""
    starts = run.find("train_started")
    if not starts:
        result.missing("a start of training", found_in=LEDGER_NAME)
        return
    base = run.base_path()
    if base is None:
        result.missing("the base model's files", found_in="base/")
        return
    roots, where = _base_roots(base), run.name(base)
    start = find_start(run, starts[-1], base, roots.stored, result) or Start("the base", *roots, where)
    for event in starts:
        _check_event(event, start, result)
        check_base_name(run, event, base, result)
    _check_records(run, start, result)
    _check_compared(run, roots.stored, where, result)
    _check_settings(run, starts[-1], result)
    check_recipe(run, "train", starts[-1], starts[-1].data.get("config"), result)
    applied = run.applied()
    adapter = {} if applied is None else {"adapter": applied.data.get("source")}
    check_recipe(run, "base", starts[-1], {"source": starts[-1].data.get("base"), **adapter}, result)


def _base_roots(base: Path) -> TensorRoots:
    if base.is_file():
        from ar2diff.audit.live.gguf_root import gguf_root

        root = gguf_root(base)
        return TensorRoots(stored=root, live=root)
    tensors = list_tensors(base)
    tied = read_decoder_config(read_object(base / "config.json")).tied_head
    return both_roots(tensors, tied_head=tied)


def _check_event(event: LedgerEvent, start: Start, result: ClaimResult) -> None:
    here = {"claimed_in": line_of(event), "found_in": start.where}
    what = f"tensor root of {start.name} as stored"
    result.equal(what, event.data.get("base_tensor_root"), start.stored, **here)
    if start.live is not None:
        result.equal("tensor root of the live weights (fp32)", event.data.get("live_tensor_root"), start.live, **here)
    for name in ("missing", "unexpected"):
        result.equal(f"{name} tensors", [], event.data.get(name), claimed_in="strict load", found_in=line_of(event))


def _check_records(run: RunFiles, start: Start, result: ClaimResult) -> None:
    """What else names the root that training began at: run.json and the checkpoints' states."""
    records = [run.folder / RUN_NAME, *(folder / "training.json" for folder in run.checkpoints())]
    for path in records:
        if path.is_file():
            root = read_object(path).get("base_tensor_root")
            what = f"tensor root of {start.name}"
            result.equal(what, root, start.stored, claimed_in=run.name(path), found_in=start.where)


def _check_compared(run: RunFiles, stored: str, where: str, result: ClaimResult) -> None:
    """An evaluation compares with the base itself."""
    for event in run.find("evaluate"):
        root = (event.data.get("roots") or {}).get("parent")
        result.equal("tensor root of the base", root, stored, claimed_in=line_of(event), found_in=where)


def _check_settings(run: RunFiles, started: LedgerEvent, result: ClaimResult) -> None:
    """The training's settings beside the run are those that the ledger holds."""
    if (run.folder / RUN_NAME).is_file() and (written := read_object(run.folder / RUN_NAME)).get("config"):
        here = {"claimed_in": line_of(started), "found_in": RUN_NAME}
        result.equal("settings of the training", started.data.get("config"), written["config"], **here)
