"""Part of A2 and A5: answers of the parent are the logged ones, by the base itself, to prompts that came before."""

from typing import Any

from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles, line_of, read_object
from ar2diff.data.locate import describe_files
from ar2diff.hashing import sha256_json
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent
from ar2diff.sources.receipt import RECEIPT_NAME

ANSWERS_EVENT = "parent_answers"
# Prompts that no fetch brings.
MADE_HERE = ("procedural:", "self")


def check_answers_before(run: RunFiles, source: str, prepared: LedgerEvent, result: ClaimResult) -> None:
    """The answers were logged before the data was prepared, and their prompts fetched before that."""
    answered = [event for event in run.find(ANSWERS_EVENT) if event.data.get("source") == source]
    if not answered:
        result.missing(f"the answers of {source}", found_in=LEDGER_NAME)
        return
    _check_order(f"{source} was answered before the data was prepared", answered[0], prepared, result)
    prompts = source.removeprefix("parent:")
    if prompts.startswith(MADE_HERE):
        return
    fetched = [event for event in run.find("fetch") if event.data.get("source") == prompts]
    if not fetched:
        result.missing(f"a fetch of {prompts}", found_in=LEDGER_NAME)
        return
    _check_order(f"{prompts} was fetched before it was answered", fetched[0], answered[0], result)


def check_answers(run: RunFiles, source: str, result: ClaimResult) -> None:
    """Files, receipt and ledger agree on the answers, and the model that gave them is the base itself."""
    answered = [event for event in run.find(ANSWERS_EVENT) if event.data.get("source") == source]
    folder = run.answer_folders().get(source)
    if not answered or folder is None:
        result.missing(f"the answers of {source}", found_in=LEDGER_NAME if not answered else "answers/")
        return
    event, receipt = answered[-1], read_object(folder / RECEIPT_NAME)
    here = {"claimed_in": line_of(event), "found_in": run.name(folder)}
    logged = {name: value for name, value in event.data.items() if name != "folder"}
    result.equal("the receipt of the answers is the logged one", sha256_json(logged), sha256_json(receipt), **here)
    files = describe_files(sorted(folder.glob("*.jsonl")))
    result.equal(f"files of the answers of {source}", event.data.get("files"), files, **here)
    # Training may have begun at an adapter on the base; the answers are the base's own.
    told = run.applied() or run.last("train_started")
    if told is not None:
        base = told.data.get("base_tensor_root")
        result.equal(
            "the model that answered is the base",
            base,
            _root(event.data),
            claimed_in=line_of(told),
            found_in=line_of(event),
        )


def _root(data: dict[str, Any]) -> object:
    request = data.get("request")
    model = request.get("model") if isinstance(request, dict) else None
    return model.get("tensor_root") if isinstance(model, dict) else None


def _check_order(what: str, first: LedgerEvent, second: LedgerEvent, result: ClaimResult) -> None:
    result.holds(
        what,
        first.seq < second.seq,
        claimed="earlier line",
        claimed_in=line_of(second),
        found=first.seq + 1,
        found_in=line_of(first),
    )
