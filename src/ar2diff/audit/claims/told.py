"""Parts of A3, A5, A9, A11, A12: names and settings that the documents show, against what they follow from.

The key's holder can sign any of them; the files, and the other events of the same run, say otherwise.
"""

from pathlib import Path
from typing import Any

from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import BASE_DIR, RunFiles, line_of
from ar2diff.hashing import sha256_json
from ar2diff.provenance.ledger import LedgerEvent
from ar2diff.sources.spec import EMBEDDED_BASE, EMBEDDED_NAME
from ar2diff.tokenizer import Tokenizer

RECIPE_EVENT, FETCH_EVENT = "recipe_started", "fetch"


def check_base_name(run: RunFiles, started: LedgerEvent, base: Path, result: ClaimResult) -> None:
    """A3: what a training calls its base is the source that was fetched, or the path where it lies."""
    claimed = str(started.data.get("base"))
    fetched = [event for event in run.find(FETCH_EVENT) if event.data.get("folder") == BASE_DIR]
    names = {name for event in fetched for name in _names_of(event)}
    is_path = ":" not in claimed and Path(claimed).name in (BASE_DIR, base.name)
    result.holds(
        "the name of the base is that of what was fetched",
        claimed in names or is_path,
        claimed=claimed,
        claimed_in=line_of(started),
        found=sorted(names) or run.name(base),
        found_in=line_of(fetched[-1]) if fetched else run.name(base),
    )


def check_recipe(run: RunFiles, section: str, event: LedgerEvent | None, made: object, result: ClaimResult) -> None:
    """A3, A5: a section of the newest recipe is what the stage's event says; a run without a recipe passes."""
    recipe = run.last(RECIPE_EVENT)
    if recipe is None or event is None:
        return
    content = recipe.data.get("recipe") or {}
    where = line_of(recipe)
    digest = sha256_json(content)
    result.equal("digest of the recipe", recipe.data.get("sha256"), digest, claimed_in=where, found_in=where)
    what = f"the recipe's section {section}"
    result.equal(what, content.get(section), made, claimed_in=where, found_in=line_of(event))


def check_described(started: LedgerEvent, checkpoint: Path, mask_token_id: int, result: ClaimResult) -> None:
    """A12: what the start of training says beside its settings follows from them, and from the tokenizer."""
    objective: dict[str, Any] = (started.data.get("config") or {}).get("objective") or {}
    sizes = objective.get("block_sizes") or [None]
    wanted = {"objective": objective, "block_size": sizes[-1], "shift_logits": objective.get("shift_logits")}
    here = {"claimed_in": line_of(started), "found_in": "its settings"}
    for name, value in wanted.items():
        result.equal(f"{name} as told", started.data.get(name), value, **here)
    text = Tokenizer.from_folder(checkpoint).id_to_token(mask_token_id)
    # A mask beyond the tokenizer's own ids has no text there.
    if text is not None:
        here["found_in"] = f"{checkpoint.name}/tokenizer.json"
        result.equal("text of the mask token", started.data.get("mask_token"), text, **here)


def check_end(ended: LedgerEvent, result: ClaimResult) -> None:
    """A11: the end of training names the checkpoint of its own step."""
    step = ended.data.get("step")
    wanted = f"step-{step:06d}" if type(step) is int else None
    here = {"claimed_in": line_of(ended), "found_in": "its step"}
    result.equal("checkpoint at the end of training", ended.data.get("checkpoint"), wanted, **here)


def check_elapsed(ended: LedgerEvent, lines: list[dict[str, Any]], where: str, result: ClaimResult) -> None:
    """A9: the training's time is that of its last step."""
    found = lines[-1].get("elapsed_s") if lines else 0.0
    result.equal("seconds of training", ended.data.get("elapsed_s"), found, claimed_in=line_of(ended), found_in=where)


def _names_of(event: LedgerEvent) -> set[str]:
    """How a fetched source may be called: as pinned, as asked for, and by the name of the one that comes along."""
    source, revision, asked = (event.data.get(name) for name in ("source", "revision", "resolved_from"))
    names = {str(source)}
    if revision and asked:
        names.add(str(source).replace(f"@{revision}", f"@{asked}"))
    return names | {EMBEDDED_NAME} if source == str(EMBEDDED_BASE) else names
