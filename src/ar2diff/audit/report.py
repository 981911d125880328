"""The audit's report for people: a verdict for each claim, and both values where they differ."""

from ar2diff.audit.result import AuditReport, Check, ClaimResult
from ar2diff.audit.table import find_claim

LIMIT = (
    "What this cannot show: who controls the machine and the key can fabricate a whole consistent run. "
    "Publish the ledger's head elsewhere, and compare."
)


def render_text(report: AuditReport) -> str:
    """The report as lines of plain text, the verdict last, where a terminal leaves off."""
    lines = []
    for claim in report.claims:
        level = f" [{claim.level}]" if claim.level else ""
        lines.append(f"{claim.id:<4} {claim.verdict:<17}{claim.title}{level}")
        lines += [f"    {line}" for line in _explain(claim)]
    counts = {
        v: sum(c.verdict == v for c in report.claims) for v in ("pass", "fail", "evidence missing", "not claimed")
    }
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    lines += ["", f"ledger: {report.ledger_size} lines, head {report.ledger_head}", LIMIT]
    return "\n".join([*lines, f"verdict: {report.verdict} ({counted})"]) + "\n"


def render_explanation(claim_id: str) -> str:
    """What one claim means."""
    claim = find_claim(claim_id)
    return f"{claim_id}: {claim.title}\n\nDerived from: {claim.derived}\n\nFails on: {claim.fails}\n"


def describe_check(check: Check) -> str:
    """One comparison on one line."""
    if check.verdict == "evidence missing":
        return f"missing: {check.what} ({check.found}, {check.found_in})"
    claimed = f"{check.claimed or 'none'} ({check.claimed_in})" if check.claimed_in else check.claimed
    return (
        f"{check.verdict}: {check.what}: claimed {claimed or '-'}, found {check.found or 'none'} ({check.found_in})"
    )


def _explain(claim: ClaimResult) -> list[str]:
    """What did not hold; of a claim that holds, what it rests on in one line."""
    bad = [check for check in claim.checks if check.verdict in ("fail", "evidence missing")]
    if bad:
        more = [f"and {len(bad) - 8} more"] if len(bad) > 8 else []
        return [describe_check(check) for check in bad[:8]] + more
    last = claim.checks[-1]
    if claim.verdict == "not claimed":
        return [last.what]
    more_text = f"{len(claim.checks)} comparisons, the last: " if len(claim.checks) > 1 else ""
    return [f"{more_text}{describe_check(last).removeprefix('pass: ')}"]
