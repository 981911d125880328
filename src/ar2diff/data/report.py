"""A data folder as one HTML page that stands alone: no scripts, no other files, all text of the data escaped."""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ar2diff.data.inspect import read_removed
from ar2diff.data.shards import TokenShard
from ar2diff.data.stream import RowStream

MAX_SHOWN = 200
NUM_BARS = 32
WIDTH, HEIGHT = 640, 160
STYLE = """
:root { color-scheme: light dark; --line: #8885; --shade: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
code, p { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }
td.number { text-align: right; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; margin-bottom: 1rem; }
.pair pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--shade); }
.pair pre { padding: .6rem; margin: .2rem 0; }
rect { fill: #4a7ab5; } text { font: 11px sans-serif; fill: currentColor; }
@media (max-width: 40rem) { .pair { grid-template-columns: 1fr; gap: .2rem; } th, td { padding-right: .5rem; } }
"""


def build_report(folder: Path, *, row_len: int | None = None) -> str:
    """The page of a finished data folder.

    Args:
        row_len: the row length whose packing is shown; the data's longest allowed document where None.

    Raises:
        DataError: the folder is not finished or damaged, or a document is longer than `row_len`.
    """
    shard = TokenShard(folder)
    row_len = row_len or int(shard.receipt["config"]["max_document_len"])
    parts = [
        f"<h1>Data: {escape(folder.resolve().name)}</h1>",
        _describe(shard),
        "<h2>Sources</h2>",
        _build_sources(shard.receipt["sources"]),
        "<h2>Tokens of a document</h2>",
        build_histogram(shard.document_lens),
        "<h2>Packing</h2>",
        _build_packing(folder, row_len),
        *_build_removed(folder, shard.receipt["decontamination"]),
    ]
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>ar2diff data report</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _describe(shard: TokenShard) -> str:
    lens, prompt_lens = shard.document_lens, shard.prompt_lens
    loss_tokens = int(lens.sum() - prompt_lens.sum())
    text = f"{len(shard)} documents, {len(shard.token_ids)} tokens, of which {loss_tokens} carry the loss."
    return f"<p>{text}<br>Digest <code>{escape(str(shard.receipt['digest']))}</code></p>"


def _build_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = [_build_row("th", header), *(_build_row("td", row) for row in rows)]
    return '<div class="wide"><table>' + "".join(cells) + "</table></div>"


def _build_row(tag: str, values: Sequence[object]) -> str:
    return "<tr>" + "".join(_build_cell(tag, value) for value in values) + "</tr>"


def _build_cell(tag: str, value: object) -> str:
    kind = ' class="number"' if isinstance(value, int | float) else ""
    return f"<{tag}{kind}>{escape(str(value))}</{tag}>"


def _build_sources(sources: Sequence[dict[str, Any]]) -> str:
    rows = [[s["source"], s["rows"], s["documents"], s["tokens"]] for s in sources]
    drops = [[s["source"], reason, count] for s in sources for reason, count in s["dropped"].items()]
    used = _build_table(["source", "rows", "documents", "tokens"], rows)
    if not drops:
        return used + "<p>Every row is used.</p>"
    return used + "<h2>Rows not used</h2>" + _build_table(["source", "reason", "rows"], drops)


def build_histogram(lens: npt.NDArray[np.int64]) -> str:
    """Documents by length as an inline SVG."""
    counts, edges = np.histogram(lens, bins=NUM_BARS)
    top, step = max(int(counts.max()), 1), WIDTH / NUM_BARS
    bars = []
    for place, count in enumerate(counts.tolist()):
        tall = count / top * (HEIGHT - 20)
        title = f"<title>{edges[place]:.0f} to {edges[place + 1]:.0f} tokens: {count}</title>"
        x, y = place * step, HEIGHT - 20 - tall
        bars.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{step - 1:.1f}" height="{tall:.1f}">{title}</rect>')
    labels = [
        f'<text x="0" y="{HEIGHT - 4}">{edges[0]:.0f}</text>',
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{edges[-1]:.0f} tokens</text>',
    ]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {size} role="img" aria-label="documents by length">{"".join(bars + labels)}</svg>'


def _build_packing(folder: Path, row_len: int) -> str:
    stream = RowStream(folder, row_len=row_len, seed=0)
    return f"<p>{stream.num_rows} rows of {row_len} positions, {stream.fill:.2%} of them filled.</p>"


def _build_removed(folder: Path, decontamination: dict[str, Any]) -> list[str]:
    hits: list[dict[str, Any]] = []
    repeats: list[list[object]] = []
    kinds = Counter[str]()
    for entry in read_removed(folder):
        kinds[entry["reason"]] += 1
        if entry["reason"] == "evaluation item" and len(hits) < MAX_SHOWN:
            hits.append(entry)
        elif entry["reason"] == "near duplicate" and len(repeats) < MAX_SHOWN:
            repeats.append([entry["id"], entry["earlier"], float(entry["similarity"])])
    counts = [[r["benchmark"], r["policy"], r["rule"], r["rows"]] for r in decontamination["removed"]]
    parts = ["<h2>Evaluation items found in the sources</h2>"]
    parts.append(_build_table(["benchmark", "policy", "rule", "rows"], counts) if counts else "<p>None.</p>")
    parts += [_build_pair(entry) for entry in hits]
    if kinds["evaluation item"] > len(hits):
        parts.append(f"<p>The first {len(hits)} of {kinds['evaluation item']} are shown.</p>")
    if repeats:
        parts.append(f"<h2>Near duplicates</h2><p>The first {len(repeats)} of {kinds['near duplicate']}.</p>")
        parts.append(_build_table(["row", "repeats", "similarity"], repeats))
    return parts


def _build_pair(entry: dict[str, Any]) -> str:
    head = f"{entry['id']} repeats {entry['item']} ({entry['policy']}, {entry['rule']}: {entry['gram']})"
    if not entry.get("item_text"):
        return f"<p>{escape(head)}<br>Only hashes of this benchmark are kept.</p>"
    texts = [("row", entry["text"]), ("evaluation item", entry["item_text"])]
    columns = "".join(f"<div>{name}<pre>{escape(text)}</pre></div>" for name, text in texts)
    return f'<p>{escape(head)}</p><div class="pair">{columns}</div>'
