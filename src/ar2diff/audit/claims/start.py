"""Part of A3: where a run has put a stored adapter on its base, training began at just what the two make.

RUN/start holds the base's tensors with the adapter's mask row, the base's configuration, and the adapter's files as
they came. `adapter_applied` in the ledger names these files, the base's root and that of what came out.
"""

from pathlib import Path
from typing import Any, NamedTuple

from ar2diff import __version__
from ar2diff.audit.claims.inventory import (
    ADAPTER_CONFIG_NAME,
    DIFFUSION_KEY,
    check_adapter_settings,
    check_tensors,
)
from ar2diff.audit.claims.parent import check_parent
from ar2diff.audit.claims.told import FETCH_EVENT, RECIPE_EVENT
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import BASE_DIR, START_DIR, RunFiles, line_of, read_object
from ar2diff.audit.tensor_files import (
    ADAPTER_NAME,
    SINGLE_NAME,
    both_roots,
    list_model_tensors,
    list_tensors,
    stored_root,
)
from ar2diff.data.pipeline import fingerprint_tokenizer
from ar2diff.hashing import sha256_file, sha256_json
from ar2diff.models.families.table import read_decoder_config
from ar2diff.provenance.environment import CODE_EVENT
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent
from ar2diff.sources import shipped
from ar2diff.sources.shipped import SHIPPED_PREFIX
from ar2diff.tokenizer import Tokenizer

LOCAL_PREFIX = "local:"
DIFFUSION_NAME = "block_diffusion.json"
ADAPTER_FILES = (ADAPTER_NAME, ADAPTER_CONFIG_NAME, DIFFUSION_NAME)
MODEL_FILES = {SINGLE_NAME, "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
# What an applied adapter writes into the base's config.json; all else stays.
OWN_KEYS = {DIFFUSION_KEY, "vocab_size", "dtype", "torch_dtype"}
USING_STAGES = ("prepare", "train_started")


class Start(NamedTuple):
    """Where training began.

    Attributes:
        name: how a report calls it.
        stored: the tensor root as stored, an adapter's tensors included.
        live: that of the decoder's own weights as fp32; None where the files are not there.
        where: the place in the run that says so.
    """

    name: str
    stored: str
    live: str | None
    where: str


def find_start(run: RunFiles, started: LedgerEvent, base: Path, base_root: str, result: ClaimResult) -> Start | None:
    """The base with its adapter, after it was checked, or None where training began at the base."""
    event = run.applied()
    _check_recipes(run, event, result)
    if event is None:
        return None
    where = line_of(event)
    count = len(run.find(event.type))
    result.equal("adapters that were put on the base", 1, count, claimed_in="one run", found_in=LEDGER_NAME)
    _check_order(run, event, result)
    _check_source(run, event, result)
    found_in = run.name(base)
    root = event.data.get("base_tensor_root")
    result.equal("tensor root of the base under the adapter", root, base_root, claimed_in=where, found_in=found_in)
    folder = run.folder / START_DIR
    result.equal("folder of the start", event.data.get("folder"), START_DIR, claimed_in=where, found_in=START_DIR)
    if not folder.is_dir():
        result.missing("the model that training began at", found_in=START_DIR)
        return Start("the start", str(event.data.get("tensor_root")), None, where)
    _check_files(event, folder, result)
    start = _read_start(folder)
    root = event.data.get("tensor_root")
    result.equal("tensor root of the base with its adapter", root, start.stored, claimed_in=where, found_in=START_DIR)
    _check_model(run, started, base, folder, result)
    return start


def _check_recipes(run: RunFiles, event: LedgerEvent | None, result: ClaimResult) -> None:
    """Every recipe of the run names the adapter that was applied; without one, none does."""
    recipes = run.find(RECIPE_EVENT)
    if event is not None and not recipes:
        result.missing("a recipe that names the adapter", found_in=LEDGER_NAME)
    source = None if event is None else event.data.get("source")
    others = [line_of(recipe) for recipe in recipes if _adapter_of(recipe.data) != source]
    if event is not None or others:
        where = LEDGER_NAME if event is None else line_of(event)
        what = "recipes that name another adapter than the one that was put on the base"
        result.equal(what, [], others[:5], claimed_in=where, found_in=LEDGER_NAME)


def _adapter_of(data: dict[str, Any]) -> object:
    base = (data.get("recipe") or {}).get("base")
    return base.get("adapter") if isinstance(base, dict) else None


def _check_order(run: RunFiles, event: LedgerEvent, result: ClaimResult) -> None:
    """The base was there before the adapter was put on it, and nothing was made of it before that."""
    fetched = [fetch for fetch in run.find(FETCH_EVENT) if fetch.data.get("folder") == BASE_DIR]
    used = [stage for stage in run.events if stage.type in USING_STAGES]
    pairs = [
        ("the base was fetched before the adapter was put on it", fetched[:1], [event]),
        ("the adapter was put on the base before that was used", [event], used[:1]),
    ]
    for what, before, after in pairs:
        if not before or not after:
            continue
        result.holds(
            what,
            before[0].seq < after[0].seq,
            claimed="earlier line",
            claimed_in=line_of(after[0]),
            found=before[0].seq + 1,
            found_in=line_of(before[0]),
        )


def _check_source(run: RunFiles, event: LedgerEvent, result: ClaimResult) -> None:
    """The adapter is called as a recipe may call it; one that comes with this package has its files' digests."""
    source, where = str(event.data.get("source")), line_of(event)
    if not source.startswith((SHIPPED_PREFIX, LOCAL_PREFIX)):
        result.fail("an adapter is shipped:NAME or local:PATH", source, found_in=where)
    if not source.startswith(SHIPPED_PREFIX):
        return
    name, found_in = source.removeprefix(SHIPPED_PREFIX), "this installation"
    if name not in shipped.list_shipped():
        result.missing(f"the shipped adapter {name}: install the version that has it", found_in=found_in)
        return
    receipt = shipped.read_shipped_receipt(shipped.SHIPPED_DIR / name)["files"]
    found, logged = {file: receipt.get(file) for file in ADAPTER_FILES}, event.data.get("files")
    if found != logged and (ran := _version_of(run)) != __version__:
        here = f"ar2diff {__version__}"
        result.missing(f"the shipped adapter {name} of ar2diff {ran}: install it", found=here, found_in=found_in)
        return
    result.equal(f"files of the shipped adapter {name}", logged, found, claimed_in=where, found_in=found_in)


def _version_of(run: RunFiles) -> object:
    code = run.last(CODE_EVENT)
    return None if code is None else (code.data.get("versions") or {}).get("ar2diff")


def _check_files(event: LedgerEvent, folder: Path, result: ClaimResult) -> None:
    """The adapter's files as logged, and none beside them that no model has."""
    found = {name: sha256_file(folder / name) for name in ADAPTER_FILES}
    here = {"claimed_in": line_of(event), "found_in": START_DIR}
    result.equal("files of the adapter", event.data.get("files"), found, **here)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    extra = sorted(names - MODEL_FILES - set(ADAPTER_FILES))
    result.equal(
        "files that are none of the model's", [], extra[:5], claimed_in="an applied adapter", found_in=START_DIR
    )


def _read_start(folder: Path) -> Start:
    tied = read_decoder_config(_plain(read_object(folder / "config.json"))).tied_head
    live = both_roots(list_tensors(folder), tied_head=tied).live
    return Start("the start", stored_root(list_model_tensors(folder)), live, START_DIR)


def _check_model(run: RunFiles, started: LedgerEvent, base: Path, folder: Path, result: ClaimResult) -> None:
    """Tensors, configuration and tokenizer are the base's; the mask's row and what decodes are the adapter's."""
    config = read_object(folder / "config.json")
    check_tensors(folder, START_DIR, config, result)
    stored = read_object(folder / DIFFUSION_NAME)
    settings = {"claimed_in": f"{START_DIR}/{DIFFUSION_NAME}", "found_in": f"{START_DIR}/config.json"}
    result.equal("how the start decodes", sha256_json(stored), sha256_json(config.get(DIFFUSION_KEY)), **settings)
    check_adapter_settings(run, started, folder, result)
    mask = stored["mask_token_id"]
    here = {"claimed_in": line_of(started), "found_in": settings["claimed_in"]}
    result.equal("mask token of the start", started.data.get("mask_token_id"), mask, **here)
    check_parent(run, folder, int(mask), result)
    _check_config(run, base, config, int(mask), result)
    prepared = run.last("prepare")
    if prepared is not None:
        found = fingerprint_tokenizer(Tokenizer.from_folder(folder))
        here = {"claimed_in": line_of(prepared), "found_in": f"{START_DIR}/tokenizer.json"}
        result.equal("tokenizer of the start", prepared.data.get("tokenizer"), found, **here)


def _check_config(run: RunFiles, base: Path, config: dict[str, Any], mask: int, result: ClaimResult) -> None:
    """Nothing that the decoder computes is another: the vocabulary alone may have grown, by the mask."""
    original = _read_config(base)
    before, after = ({key: v for key, v in c.items() if key not in OWN_KEYS} for c in (original, config))
    changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    here = {"claimed_in": run.name(base), "found_in": f"{START_DIR}/config.json"}
    result.equal("settings that are not the base's", [], changed[:5], **here)
    rows = max(read_decoder_config(_plain(original)).vocab_size, mask + 1)
    result.equal("rows of the vocabulary", rows, config.get("vocab_size"), **here)


def _read_config(base: Path) -> dict[str, Any]:
    if base.is_dir():
        return read_object(base / "config.json")
    from ar2diff.audit.live.gguf_root import read_gguf_config

    return read_gguf_config(base)


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != DIFFUSION_KEY}
