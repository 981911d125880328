"""A18: the ledger is untouched. The chain shows changes, the signed heads show what was cut off its end."""

from ar2diff.audit.result import ClaimResult
from ar2diff.audit.run_files import RunFiles
from ar2diff.errors import LedgerError
from ar2diff.provenance.ledger import LEDGER_NAME, LedgerEvent, read_ledger
from ar2diff.provenance.signing import HEADS_NAME, SIGNER_EVENT, SignedHead, read_heads


def check_ledger(run: RunFiles, result: ClaimResult, *, expected_key: str | None) -> None:
    """Chain, sequence, run id and every signed head.

    Args:
        expected_key: the key ids that may have signed, separated by commas, where the auditor knows them.
    """
    try:
        events = list(read_ledger(run.folder / LEDGER_NAME))
    except LedgerError as error:
        result.fail("every line follows from the one before", error.problem, found_in=LEDGER_NAME)
        events = run.events
    else:
        if not events:
            result.missing("the ledger has lines", found_in=LEDGER_NAME)
            return
        result.equal(
            "every line follows from the one before", "unbroken", "unbroken", claimed_in="prev", found_in=LEDGER_NAME
        )
    _check_tail(run, result)
    _check_times(events, result)
    _check_heads(run, events, result, expected_key)


def _check_tail(run: RunFiles, result: ClaimResult) -> None:
    content = (run.folder / LEDGER_NAME).read_bytes()
    torn = len(content) - content.rfind(b"\n") - 1
    if torn:
        result.fail("the last line is whole", f"{torn} bytes after the last line", found_in=LEDGER_NAME)


def _check_times(events: list[LedgerEvent], result: ClaimResult) -> None:
    starts = sum(event.type == "run_started" for event in events)
    result.equal("the run starts once", 1, starts, claimed_in="the ledger's format", found_in=LEDGER_NAME)


def _check_heads(run: RunFiles, events: list[LedgerEvent], result: ClaimResult, expected_key: str | None) -> None:
    path = run.folder / HEADS_NAME
    keys = [event.data for event in events if event.type == SIGNER_EVENT]
    if not keys:
        if path.exists():
            result.fail("the key of the signed heads is in the ledger", "no signer event", found_in=LEDGER_NAME)
        else:
            result.missing("signed heads: without them lines cut off the end are not seen", found_in=HEADS_NAME)
        return
    _check_keys(sorted({str(key.get("keyid")) for key in keys}), expected_key, result)
    if not path.is_file():
        result.fail(
            "heads are signed", "no such file", found_in=HEADS_NAME, claimed="a signer", claimed_in=LEDGER_NAME
        )
        return
    heads = read_heads(path, keys)
    if not path.read_bytes().endswith(b"\n") or not heads:
        result.fail("the file of signed heads is whole", "cut or empty", found_in=HEADS_NAME)
    for number, head in enumerate(heads, start=1):
        _check_head(events, head, number, result)
    _check_covered(events, heads, result)


def _check_keys(used: list[str], expected: str | None, result: ClaimResult) -> None:
    result.level = f"signed by {', '.join(used)}{'' if expected else '; --key compares'}"
    if expected is not None:
        others = sorted(set(used) - {key.strip() for key in expected.split(",")})
        result.equal("keys beside the expected ones", [], others, claimed_in="--key", found_in=LEDGER_NAME)
    elif len(used) > 1:
        # Whoever lacks the first key can still add lines, and sign them with a key of his own.
        what = "word of who holds the second key: name those that you know with --key KEY,KEY"
        result.missing(what, found=", ".join(used), found_in=LEDGER_NAME)


def _check_head(events: list[LedgerEvent], head: SignedHead, number: int, result: ClaimResult) -> None:
    where = f"{HEADS_NAME} line {number}"
    if head.fault is not None:
        result.fail("the signature holds", head.fault, found_in=where)
        return
    run_id = events[0].data.get("run_id") if events else None
    result.equal(f"run id of signed head {number}", head.run_id, run_id, claimed_in=where, found_in=LEDGER_NAME)
    if not 1 <= head.size <= len(events):
        found = f"{len(events)} lines"
        result.fail(
            "no line was cut off", found, found_in=LEDGER_NAME, claimed=f"{head.size} lines", claimed_in=where
        )
        return
    found_head = events[head.size - 1].digest
    result.equal(f"line {head.size} is the signed one", head.head, found_head, claimed_in=where, found_in=LEDGER_NAME)


def _check_covered(events: list[LedgerEvent], heads: list[SignedHead], result: ClaimResult) -> None:
    """A signed head covers all lines before it, so the last line must be a signed one."""
    signed = max((head.size for head in heads if head.fault is None), default=0)
    if signed < len(events):
        text = f"{signed} of {len(events)} lines"
        result.missing("the last line is signed (a killed run leaves it unsigned)", found=text, found_in=HEADS_NAME)
    else:
        result.equal("the last line is signed", len(events), signed, claimed_in=LEDGER_NAME, found_in=HEADS_NAME)
