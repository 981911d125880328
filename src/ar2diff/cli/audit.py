"""`ar2diff audit RUN`: every claim of a run recomputed from its files and its ledger."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ar2diff.audit.result import AuditReport


def audit(
    run: Path | None = None,
    *,
    json: bool = False,
    html: Path | None = None,
    deep: bool = False,
    replay: int | None = None,
    server: str = "auto",
    only: str | None = None,
    explain: str | None = None,
    key: str | None = None,
    statements: Path | None = None,
) -> int:
    """Recompute every claim of a run, offline; exit code 0 pass, 1 a claim failed, 2 evidence missing, 3 usage.

    Args:
        run: The run directory, or a copy of one.
        json: Print the result as JSON.
        html: Also write it as a page for people.
        deep: Recompute the inputs of every training step instead of a sample, and start a server whatever its size.
        replay: Also train this many steps again, and compare losses and tensor roots.
        server: What A13 and A14 ask: the address of a running server (its key in AR2DIFF_API_KEYS), auto to start one
            on the loopback for models up to 1 GB or with --deep, or none.
        only: Claims to check, such as A1,A18; all by default.
        explain: Say what a claim such as A7 means, and check nothing.
        key: The id of the key that must have signed the ledger; several, where several have, with commas.
        statements: Also write in-toto statements of the stages and of this audit, signed with the user's key.
    """
    import json as json_format

    from ar2diff.audit.html import render_html
    from ar2diff.audit.report import render_explanation, render_text
    from ar2diff.audit.run_files import AuditUsageError
    from ar2diff.audit.table import CLAIMS, REPLAY_ID
    from ar2diff.audit.verify import audit_run
    from ar2diff.files import write_text

    if explain is not None:
        if explain not in (*CLAIMS, REPLAY_ID):
            raise AuditUsageError("unknown claim", given=explain, fix=f"Choose from {', '.join(CLAIMS)}")
        print(render_explanation(explain), end="")
        return 0
    if run is None:
        raise AuditUsageError("no run directory is named", fix="Write `ar2diff audit RUN`")
    chosen = tuple(part.strip() for part in only.split(",")) if only else ()
    report = audit_run(
        run,
        deep=deep,
        expected_key=key,
        only=chosen,
        server=server,
        api_key=_first_key(),
        replay=replay,
        progress=_tell,
    )
    if statements is not None:
        _write_statements(statements, run, report)
    if html is not None:
        write_text(html, render_html(report))
    print(json_format.dumps(report.as_json(), indent=2, ensure_ascii=False) if json else render_text(report).rstrip())
    return report.exit_code


def _first_key() -> str | None:
    import os

    from ar2diff.cli.serve import KEYS_VARIABLE

    return next(iter(os.environ.get(KEYS_VARIABLE, "").split()), None)


def _tell(claim_id: str) -> None:
    """Say what is being checked, on a terminal that somebody watches."""
    import sys

    if sys.stderr.isatty():
        print(f"\r\x1b[Kchecking {claim_id} ...\r", end="", file=sys.stderr, flush=True)


def _write_statements(path: Path, run: Path, report: "AuditReport") -> None:
    """One DSSE envelope a line: a provenance for each stage, and the audit's summary last."""
    from ar2diff.audit.run_files import RunFiles
    from ar2diff.cli.open_ledger import default_key_path
    from ar2diff.files import write_bytes
    from ar2diff.provenance.signing import HeadSigner
    from ar2diff.provenance.statements import PAYLOAD_TYPE, list_stage_statements, summarise_verification

    summary = summarise_verification(
        run_id=report.run_id,
        ledger_head=report.ledger_head,
        ledger_size=report.ledger_size,
        passed=report.verdict == "pass",
        verifier=report.version,
        claims={claim.id: claim.verdict for claim in report.claims},
    )
    signer = HeadSigner.open(default_key_path())
    made = [*list_stage_statements(RunFiles(run).events), summary]
    write_bytes(path, b"".join(signer.sign(statement, PAYLOAD_TYPE) for statement in made))
