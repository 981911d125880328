"""Plots as PNG inside a page: no file beside it, readable in black and white."""

import base64
import io
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def show_picture(title: str, png: bytes, note: str) -> str:
    """A heading, the picture, which scrolls where the screen is narrow, and a line about it."""
    encoded = base64.b64encode(png).decode()
    image = f'<img alt="{escape(title)}" src="data:image/png;base64,{encoded}">'
    return f'<h2>{escape(title)}</h2>\n<div class="scroll">{image}</div>\n<p class="note">{escape(note)}</p>'


def draw_png(paint: Callable[["Axes"], None]) -> bytes:
    """The picture that `paint` puts on its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    paint(axes)
    axes.grid(alpha=0.3)
    stream = io.BytesIO()
    canvas.print_png(stream)  # type: ignore[no-untyped-call]
    return stream.getvalue()


def place_legend(axes: "Axes") -> None:
    """The legend below the plot, where a narrow screen shows it too."""
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
