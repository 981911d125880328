"""Audit a run: every claim checked on its own, so that what breaks one never hides another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ar2diff import __version__
from ar2diff.audit.claims.base import check_start
from ar2diff.audit.claims.blocklist import check_blocklist
from ar2diff.audit.claims.data import check_decontamination, check_filters, check_rows
from ar2diff.audit.claims.decoding import check_decoding
from ar2diff.audit.claims.evaluation import check_evaluation
from ar2diff.audit.claims.inventory import check_inventory
from ar2diff.audit.claims.ledger import check_ledger
from ar2diff.audit.claims.release import check_release
from ar2diff.audit.claims.server import check_server
from ar2diff.audit.claims.sources import check_formats, check_order, check_pins
from ar2diff.audit.claims.surroundings import check_code, check_credentials
from ar2diff.audit.claims.training import check_resumes, check_steps
from ar2diff.audit.data_rerun import Rerun, rerun_data
from ar2diff.audit.live.server import NONE, ServerUnderAudit
from ar2diff.audit.result import AuditReport, ClaimResult
from ar2diff.audit.run_files import AuditUsageError, RunFiles
from ar2diff.audit.table import CLAIMS, REPLAY_ID, find_claim
from ar2diff.errors import Ar2diffError

CheckClaim = Callable[[RunFiles, ClaimResult], None]
Progress = Callable[[str], None]

DATA_CLAIMS = ("A5", "A6", "A8")
PLAIN_CHECKS: dict[str, CheckClaim] = {
    "A1": check_pins,
    "A2": check_order,
    "A3": check_start,
    "A4": check_formats,
    "A7": check_blocklist,
    "A10": check_resumes,
    "A11": check_release,
    "A12": check_inventory,
    "A15": check_credentials,
    "A16": check_code,
    "A17": check_evaluation,
}


def audit_run(
    folder: Path,
    *,
    deep: bool = False,
    expected_key: str | None = None,
    only: tuple[str, ...] = (),
    server: str = NONE,
    api_key: str | None = None,
    replay: int | None = None,
    progress: Progress = lambda _: None,
) -> AuditReport:
    """Check the claims of a run directory. Offline; nothing in the run is changed.

    Args:
        deep: recompute every training step's inputs instead of a sample.
        expected_key: the ids of the keys that may have signed the ledger, separated by commas.
        only: claim ids to check; all where empty.
        server: what A13 and A14 ask: the address of a running server, "auto" to start one, or "none".
        api_key: sent to that server.
        replay: training steps to do again, as one claim more.
        progress: told of each claim as it is begun.

    Raises:
        AuditUsageError: the folder is no run, or a claim id is unknown.
    """
    if unknown := sorted(set(only) - set(CLAIMS)):
        raise AuditUsageError("unknown claim", given=unknown[0], fix=f"Choose from {', '.join(CLAIMS)}")
    if replay is not None and replay < 1:
        raise AuditUsageError("a replay has at least one step", given=replay)
    run = RunFiles(folder)
    wanted = [claim_id for claim_id in CLAIMS if not only or claim_id in only]
    servers = ServerUnderAudit(server, deep=deep, api_key=api_key)
    with _rerun_if_wanted(run, wanted, progress) as rerun, servers:
        checks = _build_checks(rerun, servers, deep=deep, expected_key=expected_key)
        results = []
        for claim_id in wanted:
            progress(claim_id)
            results.append(check_claim(claim_id, checks[claim_id], run))
    if replay is not None:
        progress(REPLAY_ID)
        results.append(check_claim(REPLAY_ID, lambda run, result: _replay(run, replay, result), run))
    events = run.events
    return AuditReport(
        run_id=str(events[0].data.get("run_id")) if events else "",
        ledger_size=len(events),
        ledger_head=events[-1].digest if events else "",
        deep=deep,
        version=__version__,
        claims=tuple(results),
    )


def check_claim(claim_id: str, check: CheckClaim, run: RunFiles) -> ClaimResult:
    """One claim's result; an unreadable file counts against the claim, an absent one leaves it unproven."""
    result = ClaimResult(id=claim_id, title=find_claim(claim_id).title)
    try:
        check(run, result)
    except FileNotFoundError as error:
        result.missing("a file that the claim needs", found_in=run.name(Path(str(error.filename))))
    except ImportError as error:
        result.missing("a library that the claim needs", found=str(error), found_in="this installation")
    except Ar2diffError as error:
        result.fail("the records are readable", error.one_line().replace(str(run.folder), "RUN"), found_in="the run")
    except Exception as error:  # damaged files can break any reader in any way, and must never end the audit
        text = f"{type(error).__name__}: {error}".replace(str(run.folder), "RUN")
        result.fail("the records are readable", text, found_in="the run")
    return result


def _build_checks(
    rerun: Rerun, servers: ServerUnderAudit, *, deep: bool, expected_key: str | None
) -> dict[str, CheckClaim]:
    return {
        **PLAIN_CHECKS,
        "A13": lambda run, result: check_server(run, result, servers),
        "A14": lambda run, result: check_decoding(run, result, servers),
        "A5": lambda run, result: check_rows(run, result, rerun),
        "A6": lambda run, result: check_filters(run, result, rerun),
        "A8": lambda run, result: check_decontamination(run, result, rerun),
        "A9": lambda run, result: check_steps(run, result, deep=deep),
        "A18": lambda run, result: check_ledger(run, result, expected_key=expected_key),
    }


def _replay(run: RunFiles, count: int, result: ClaimResult) -> None:
    from ar2diff.audit.live.replay import replay_steps

    replay_steps(run, count, result)


@contextmanager
def _rerun_if_wanted(run: RunFiles, wanted: list[str], progress: Progress) -> Iterator[Rerun]:
    if not set(wanted) & set(DATA_CLAIMS):
        yield Rerun(folder=None, receipt=None, obstacle="not asked for")
        return
    progress("data made again")
    with rerun_data(run) as rerun:
        yield rerun
