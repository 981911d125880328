"""The audit as one HTML page, no scripts, no links out: verdict first, the chain as a picture, then the evidence."""

from html import escape

from ar2diff.audit.chain import CLASSES, MARKS, render_chain
from ar2diff.audit.report import LIMIT, describe_check
from ar2diff.audit.result import AuditReport, Check, ClaimResult
from ar2diff.audit.table import find_claim

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
body { color: #1a1a1a; background: #fff }
h1 { font-size: 1.6rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin-top: 2rem }
a { color: inherit }
code, td, li, p, summary { overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #8886; padding: .3rem .5rem; text-align: left; vertical-align: top }
td, th { font-size: 13px }
.pass { --c: #1b6e3c } .fail { --c: #a3121f } .missing { --c: #8a5a00 } .none { --c: #5a5a5a }
.verdict { border-left: .5rem solid var(--c); padding: .5rem 1rem; font-size: 1.2rem }
.mark { color: var(--c); font-weight: 700 }
summary { cursor: pointer; padding: .3rem 0 }
svg { width: 100%; height: auto }
svg.tall { display: none; max-width: 26rem }
svg text { font: 13px system-ui, sans-serif; fill: #1a1a1a }
svg .box { fill: #fff; stroke: var(--c); stroke-width: 2 }
svg .name { font-weight: 700 }
svg .state { fill: var(--c) }
@media (max-width: 44rem) {
  body { margin: 1rem auto }
  svg.wide { display: none } svg.tall { display: block }
  table, tbody, tr, td { display: block } thead { display: none }
  td { border: 0; padding: .1rem .5rem } tr { border-bottom: 1px solid #8886; padding: .4rem 0 }
  td:empty { display: none }
  td:nth-child(3)::before { content: "claimed: " } td:nth-child(4)::before { content: "found: " }
}
@media (prefers-color-scheme: dark) {
  body { color: #eee; background: #161616 } svg .box { fill: #161616 } svg text { fill: #eee }
  svg .state { fill: var(--c) }
  .pass { --c: #5fce8a } .fail { --c: #ff7b86 } .missing { --c: #f0b54a } .none { --c: #aaa }
}
"""


def render_html(report: AuditReport) -> str:
    """The whole page; all text of the run is escaped."""
    claims = "\n".join(_render_claim(claim) for claim in report.claims)
    verdict, style = escape(report.verdict), CLASSES[report.verdict]
    steps = "Every training step" if report.deep else "A sample of the training steps (--deep takes all)"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Audit of {escape(report.run_id)}: {escape(report.verdict)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Audit of run {escape(report.run_id)}</h1>
<p class="verdict {style}"><span class="mark">{MARKS[report.verdict]} {verdict}</span>:
{escape(_count(report))}</p>
<p>I read the files and the ledger of this run and computed each of its claims again. Nothing was taken on trust that
could be computed, nothing was fetched, and nothing in the run was changed.</p>
{_render_findings(report)}
<h2>From the base to the server</h2>
{render_chain(report.claims)}
<h2>What this letter rests on</h2>
<p>The ledger has {report.ledger_size} lines; its head is <code>{escape(report.ledger_head)}</code>. {steps} was
recomputed. The audit is that of ar2diff {escape(report.version)}. {escape(LIMIT)}</p>
<h2>Claims</h2>
{claims}
</body>
</html>
"""


def _count(report: AuditReport) -> str:
    counts = [(verdict, sum(claim.verdict == verdict for claim in report.claims)) for verdict in MARKS]
    return ", ".join(f"{count} {verdict}" for verdict, count in counts if count)


def _render_findings(report: AuditReport) -> str:
    """What did not hold, in sentences; a letter without findings says so."""
    found = [claim for verdict in ("fail", "evidence missing") for claim in report.claims if claim.verdict == verdict]
    if not found:
        return "<p>I have no findings.</p>"
    items = "\n".join(_render_finding(claim) for claim in found)
    return f"<h2>Findings</h2>\n<ul>\n{items}\n</ul>"


def _render_finding(claim: ClaimResult) -> str:
    bad = [check for check in claim.checks if check.verdict == claim.verdict]
    more = f" (the first of {len(bad)} comparisons)" if len(bad) > 1 else ""
    start = "It is contradicted" if claim.verdict == "fail" else "Evidence is missing for it"
    link = f'<a href="#{claim.id}">{claim.id}</a>'
    said = escape(describe_check(bad[0]).partition(": ")[2])
    return (
        f'<li class="{CLASSES[claim.verdict]}"><span class="mark">{MARKS[claim.verdict]}</span> {link}, '
        f"{escape(claim.title)}. {start}: {said}{more}.</li>"
    )


def _render_claim(claim: ClaimResult) -> str:
    words = find_claim(claim.id)
    opened = " open" if claim.verdict in ("fail", "evidence missing") else ""
    order = {"fail": 0, "evidence missing": 1}
    checks = sorted(claim.checks, key=lambda check: order.get(check.verdict, 2))
    rows = "\n".join(_render_check(check) for check in checks)
    mark = f'<span class="mark">{MARKS[claim.verdict]} {escape(claim.verdict)}</span>'
    level = f" <small>({escape(claim.level)})</small>" if claim.level else ""
    return f"""<details id="{claim.id}" class="{CLASSES[claim.verdict]}"{opened}>
<summary>{mark} {claim.id}: {escape(claim.title)}{level}</summary>
<p>{escape(words.derived)}</p>
<table><thead><tr><th>verdict</th><th>what</th><th>claimed</th><th>found</th></tr></thead>
<tbody>
{rows}
</tbody></table>
</details>"""


def _render_check(check: Check) -> str:
    return (
        f'<tr class="{CLASSES[check.verdict]}"><td class="mark">{MARKS[check.verdict]} {escape(check.verdict)}</td>'
        f"<td>{escape(check.what)}</td>"
        f"<td>{escape(check.claimed)}<br><small>{escape(check.claimed_in)}</small></td>"
        f"<td>{escape(check.found)}<br><small>{escape(check.found_in)}</small></td></tr>"
    )
