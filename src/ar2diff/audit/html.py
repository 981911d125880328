"""The audit as one HTML page, no scripts, no links out: verdict first, the chain as a picture, then the evidence."""

from html import escape

from ar2diff.audit.report import LIMIT
from ar2diff.audit.result import AuditReport, Check, ClaimResult
from ar2diff.audit.table import find_claim

# The stages from base to answers, and the claims that hold each of them to the one before.
CHAIN = (
    ("base", ("A1", "A2", "A4")),
    ("data", ("A5", "A6", "A7", "A8")),
    ("training", ("A3", "A9", "A10", "A16")),
    ("checkpoint", ("A11", "A12")),
    ("answers", ("A13", "A14", "A17")),
)
MARKS = {"pass": "✓", "fail": "✗", "evidence missing": "?", "not claimed": "–"}
CLASSES = {"pass": "pass", "fail": "fail", "evidence missing": "missing", "not claimed": "none"}
BOX_WIDTH, BOX_HEIGHT, GAP = 150, 96, 30

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
body { color: #1a1a1a; background: #fff }
h1 { font-size: 1.6rem }
code, td { overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #ccc; padding: .3rem .5rem; text-align: left; vertical-align: top; font-size: 13px }
.pass { --c: #1b6e3c } .fail { --c: #a3121f } .missing { --c: #8a5a00 } .none { --c: #5a5a5a }
.verdict { border-left: .5rem solid var(--c); padding: .5rem 1rem; font-size: 1.2rem }
.mark { color: var(--c); font-weight: 700 }
summary { cursor: pointer; padding: .3rem 0 }
svg { width: 100%; height: auto }
svg text { font: 13px system-ui, sans-serif; fill: #1a1a1a }
svg .box { fill: #fff; stroke: var(--c); stroke-width: 2 }
svg .name { font-weight: 700 }
svg .state { fill: var(--c) }
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
{_render_chain(report)}
<p>Ledger: {report.ledger_size} lines, head <code>{escape(report.ledger_head)}</code>.
{steps} was recomputed.
Made by ar2diff {escape(report.version)}.</p>
<p>{escape(LIMIT)}</p>
<h2>Claims</h2>
{claims}
</body>
</html>
"""


def _count(report: AuditReport) -> str:
    counts = [(verdict, sum(claim.verdict == verdict for claim in report.claims)) for verdict in MARKS]
    return ", ".join(f"{count} {verdict}" for verdict, count in counts if count)


def _render_chain(report: AuditReport) -> str:
    width = len(CHAIN) * (BOX_WIDTH + GAP) - GAP + 4
    known = {claim.id: claim for claim in report.claims}
    parts = [_render_box(idx, name, [known[i] for i in ids if i in known]) for idx, (name, ids) in enumerate(CHAIN)]
    line = (
        f'stroke="currentColor" stroke-width="2" marker-end="url(#tip)" d="M {{}} {BOX_HEIGHT / 2 + 2} h {GAP - 8}"'
    )
    starts = [4 + (idx + 1) * BOX_WIDTH + idx * GAP for idx in range(len(CHAIN) - 1)]
    arrows = [f"<path {line.format(x)}/>" for x in starts]
    under = [known[i] for i in ("A18", "A15") if i in known]
    notes = "".join(_render_note(claim, 2 + idx * 380) for idx, claim in enumerate(under))
    shape = '<path d="M0 0 L6 3 L0 6 z" fill="currentColor"/>'
    marker = f'<marker id="tip" markerWidth="6" markerHeight="6" refX="3" refY="3" orient="auto">{shape}</marker>'
    body = "\n".join([*parts, *arrows])
    return (
        f'<svg viewBox="0 0 {width} {BOX_HEIGHT + 40}" role="img" aria-label="The chain from base to answers">\n'
        f"<defs>{marker}</defs>\n{body}\n{notes}\n</svg>"
    )


def _render_note(claim: ClaimResult, x: int) -> str:
    text = f"{MARKS[claim.verdict]} {claim.id} {escape(claim.title)}"
    return f'<text class="state {CLASSES[claim.verdict]}" x="{x}" y="{BOX_HEIGHT + 28}">{text}</text>'


def _render_box(idx: int, name: str, claims: list[ClaimResult]) -> str:
    verdicts = [claim.verdict for claim in claims]
    worst = next((v for v in ("fail", "evidence missing", "pass") if v in verdicts), "not claimed")
    x = 2 + idx * (BOX_WIDTH + GAP)
    states = [f"{MARKS[claim.verdict]} {claim.id}" for claim in claims]
    rows = [" ".join(states[at : at + 2]) for at in range(0, len(states), 2)]
    texts = "".join(
        f'<text class="state" x="{x + 12}" y="{50 + 20 * row}">{escape(text)}</text>' for row, text in enumerate(rows)
    )
    return (
        f'<g class="{CLASSES[worst]}">'
        f'<rect class="box" x="{x}" y="2" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text class="name" x="{x + 12}" y="26">{escape(name)}</text>{texts}</g>'
    )


def _render_claim(claim: ClaimResult) -> str:
    words = find_claim(claim.id)
    opened = " open" if claim.verdict in ("fail", "evidence missing") else ""
    rows = "\n".join(_render_check(check) for check in claim.checks)
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
