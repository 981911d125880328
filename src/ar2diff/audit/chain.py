"""The chain from base to server as a picture: a box a stage, with the claims that hold it to the one before.

Two drawings of one chain, inline SVG: side by side for a desk, one under the other for a phone; the style shows one.
"""

from html import escape

from ar2diff.audit.result import ClaimResult

CHAIN = (
    ("base", ("A1", "A2", "A4")),
    ("data", ("A5", "A6", "A7", "A8")),
    ("training", ("A3", "A9", "A10", "A16")),
    ("checkpoint", ("A11", "A12")),
    ("answers", ("A14", "A17")),
    ("server", ("A13",)),
)
UNDER = ("A18", "A15")
MARKS = {"pass": "✓", "fail": "✗", "evidence missing": "?", "not claimed": "–"}
CLASSES = {"pass": "pass", "fail": "fail", "evidence missing": "missing", "not claimed": "none"}
BOX_WIDTH, BOX_HEIGHT, GAP, MARGIN = 132, 96, 28, 2
NOTE_HEIGHT = 24
TALL_WIDTH, TALL_HEIGHT = 320, 60
TIP = '<path d="M0 0 L6 3 L0 6 z" fill="currentColor"/>'


def render_chain(claims: tuple[ClaimResult, ...]) -> str:
    """Both drawings."""
    known = {claim.id: claim for claim in claims}
    boxes = [(name, [known[idx] for idx in ids if idx in known]) for name, ids in CHAIN]
    notes = [known[idx] for idx in UNDER if idx in known]
    return _render_wide(boxes, notes) + "\n" + _render_tall(boxes, notes)


Boxes = list[tuple[str, list[ClaimResult]]]


def _render_wide(boxes: Boxes, notes: list[ClaimResult]) -> str:
    width = len(boxes) * (BOX_WIDTH + GAP) - GAP + 2 * MARGIN
    height = BOX_HEIGHT + NOTE_HEIGHT * len(notes) + 16
    body = ""
    for idx, (name, claims) in enumerate(boxes):
        x = MARGIN + idx * (BOX_WIDTH + GAP)
        rows = [claims[at : at + 2] for at in range(0, len(claims), 2)]
        body += _box(claims, x, MARGIN, BOX_WIDTH, BOX_HEIGHT - 2 * MARGIN)
        body += _text("name", x + 12, 28, name)
        body += "".join(_states(x + 12, 54 + 22 * row, part) for row, part in enumerate(rows)) + "</g>\n"
        if idx:
            body += _arrow("wide", f"M {x - GAP + 2} {BOX_HEIGHT / 2} h {GAP - 10}")
    body += _notes(notes, BOX_HEIGHT + NOTE_HEIGHT)
    return _svg("wide", width, height, body)


def _render_tall(boxes: Boxes, notes: list[ClaimResult]) -> str:
    body, step = "", TALL_HEIGHT + GAP
    for idx, (name, claims) in enumerate(boxes):
        y = MARGIN + idx * step
        body += _box(claims, MARGIN, y, TALL_WIDTH - 2 * MARGIN, TALL_HEIGHT)
        body += _text("name", 14, y + 24, name)
        body += _states(14, y + 46, claims) + "</g>\n"
        if idx:
            body += _arrow("tall", f"M {TALL_WIDTH / 2} {y - GAP + 2} v {GAP - 10}")
    end = len(boxes) * step - GAP
    body += _notes(notes, end + NOTE_HEIGHT)
    return _svg("tall", TALL_WIDTH, end + NOTE_HEIGHT * len(notes) + 16, body)


def _svg(name: str, width: float, height: float, body: str) -> str:
    size = 'markerWidth="6" markerHeight="6" refX="3" refY="3" orient="auto"'
    return (
        f'<svg class="{name}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="The chain from base to server">\n'
        f'<defs><marker id="tip-{name}" {size}>{TIP}</marker></defs>\n{body}</svg>'
    )


def _box(claims: list[ClaimResult], x: float, y: float, width: float, height: float) -> str:
    verdicts = [claim.verdict for claim in claims]
    worst = next((v for v in ("fail", "evidence missing", "pass") if v in verdicts), "not claimed")
    titles = escape("; ".join(f"{claim.id} {claim.title}: {claim.verdict}" for claim in claims))
    shape = f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    return f'<g class="{CLASSES[worst]}"><title>{titles}</title>{shape}'


def _arrow(name: str, path: str) -> str:
    return f'<path stroke="currentColor" stroke-width="2" marker-end="url(#tip-{name})" d="{path}"/>\n'


def _notes(notes: list[ClaimResult], y: float) -> str:
    drawn = ""
    for row, claim in enumerate(notes):
        text = f"{_state(claim)} {claim.title}"
        drawn += f'<g class="{CLASSES[claim.verdict]}">{_text("state", MARGIN, y + NOTE_HEIGHT * row, text)}</g>\n'
    return drawn


def _states(x: float, y: float, claims: list[ClaimResult]) -> str:
    """Claims in one line, each in the colour of its own verdict."""
    parts = [f'<tspan class="state {CLASSES[claim.verdict]}">{_state(claim)}</tspan>' for claim in claims]
    return f'<text x="{x:g}" y="{y:g}">{" ".join(parts)}</text>'


def _state(claim: ClaimResult) -> str:
    return f"{MARKS[claim.verdict]} {claim.id}"


def _text(name: str, x: float, y: float, text: str) -> str:
    return f'<text class="{name}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
