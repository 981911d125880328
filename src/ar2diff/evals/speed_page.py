"""What `ar2diff bench` measured, as a part of the report page."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ar2diff.evals.pictures import MARKERS, draw_png, place_legend, show_picture
from ar2diff.evals.speed import BASELINE, HEADINGS, show_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTE = (
    "Tokens of all answers over the seconds of a turn, prompts included; medians over the repeats. Every contestant "
    "had its turn at every batch, in one run. Tokens a pass: of one request."
)


def render_speed(content: Mapping[str, Any]) -> str:
    """The table, the curve over batch sizes, and who is absent; `content` is that of speed.json."""
    rows: Sequence[Mapping[str, Any]] = content["rows"]
    heads = "".join(f"<th>{escape(' '.join(name.split()))}</th>" for name in ("contestant", *HEADINGS))
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in show_row(row)) + "</tr>\n" for row in rows)
    absent = "".join(
        f'<p class="note">{escape(name)} is absent: {escape(reason)}</p>'
        for name, reason in content["absent"].items()
    )
    notes = "".join(
        f'<p class="note">{escape(name)}: {escape(note)}</p>' for name, note in content["about"]["peers"].items()
    )
    curve = show_picture("Speed by batch size", draw_png(lambda axes: _paint(axes, rows)), NOTE)
    return f'{curve}\n<div class="scroll"><table>\n<tr>{heads}</tr>\n{body}</table></div>\n{notes}{absent}'


def _paint(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    sizes = sorted({row["batch_size"] for row in rows})
    for idx, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        chosen = [row for row in rows if row["name"] == name]
        rates = [row["tokens_per_s"] for row in chosen]
        axes.errorbar(
            [sizes.index(row["batch_size"]) for row in chosen],
            rates,
            yerr=[
                [rate - row["lowest"] for rate, row in zip(rates, chosen, strict=True)],
                [row["highest"] - rate for rate, row in zip(rates, chosen, strict=True)],
            ],
            fmt=f"-{MARKERS[idx % len(MARKERS)]}",
            color="black" if name == BASELINE else f"C{idx}",
            capsize=3,
            label=name,
        )
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set(xlabel="requests at a time", ylabel="tokens a second, all requests")
    axes.set_ylim(bottom=0)
    if rows:
        place_legend(axes)
