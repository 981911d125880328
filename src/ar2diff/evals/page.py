"""The comparison as one HTML page: accuracy against speed, acceptance, losses, and answers as they were denoised.

No scripts and no links out; pictures are PNG inside the page, readable in black and white.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ar2diff.evals.pictures import MARKERS, draw_png, place_legend, show_picture
from ar2diff.evals.report import BASELINE, DOMAIN_HEADINGS, EvalReport
from ar2diff.evals.scores import Answer, Score
from ar2diff.evals.speed_page import render_speed
from ar2diff.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SAMPLES = 3
_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: #1a1a1a; background: #fff; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.2rem; margin-top: 2.5rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums }
td, th { border-bottom: 1px solid #bbb; padding: .3rem .45rem; text-align: right; white-space: nowrap;
  vertical-align: top }
td:first-child, th:first-child { text-align: left }
td.wide { white-space: normal; text-align: left }
img { max-width: 100%; min-width: 30rem; height: auto; background: #fff; border-radius: 4px }
.answer { font: 15px/2 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.answer span { padding: .15em 0; border-bottom: 3px solid hsl(var(--h) 70% 45%);
  background: hsl(var(--h) 80% 50% / .16) }
.key { display: flex; flex-wrap: wrap; gap: .2em 0 }
.key span { margin-right: .6em; padding: 0 .4em; border-bottom: 3px solid hsl(var(--h) 70% 45%) }
.note { color: #555; font-size: 14px }
@media (prefers-color-scheme: dark) {
  body { color: #eee; background: #161616 } td, th { border-color: #444 } .note { color: #aaa } }
"""


def render_page(
    report: EvalReport,
    tokenizer: Tokenizer | None,
    losses: Sequence[dict[str, Any]],
    *,
    title: str,
    speed: Mapping[str, Any] | None = None,
) -> str:
    """The page.

    Args:
        tokenizer: to show the answers' tokens; without it there are no samples.
        losses: lines of the training's metrics, or none.
        speed: content of speed.json, where it was measured.
    """
    overall = [score for score in report.scores if score.domain == "all"]
    parts = [
        _render_verdict(report, overall),
        _render_table(report, overall),
        _render_domains(report) if report.has_unscored else "",
        _render_curve(overall),
        render_speed(speed) if speed else "",
        _render_acceptance(report.answers),
        _render_losses(losses),
        _render_samples(report.answers, tokenizer),
        _render_about(report.about),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _render_verdict(report: EvalReport, overall: Sequence[Score]) -> str:
    """One sentence: the fastest mode that is not worse than the AR mode beyond doubt."""
    speeds = report.as_json()["speedup_over_ar"]
    # A mode that cuts most of its answers off has shown nothing.
    shown = [s for s in overall if s.mode in speeds and 2 * s.num_graded > s.num_scored]
    fair = [s for s in shown if report.against_baseline(s).interval[1] >= 0]
    if not fair:
        return ""
    best = max(fair, key=lambda score: float(speeds[score.mode]))
    if best.mode == BASELINE:
        return "<p>No mode whose accuracy may equal that of the AR mode is faster than the AR mode.</p>"
    return (
        f"<p>The fastest mode whose accuracy may equal that of the AR mode is <strong>{escape(best.mode)}</strong>: "
        f"{speeds[best.mode]:.2f} times the AR mode's speed, {best.num_correct} of "
        f"{best.num_graded} complete answers right.</p>"
    )


def _render_table(report: EvalReport, overall: Sequence[Score]) -> str:
    heads = (
        "mode",
        "right",
        "95% interval",
        "cut off",
        "minus AR",
        "same as AR",
        "tokens/s",
        "x AR",
        "tokens a pass",
    )
    speeds = report.as_json()["speedup_over_ar"]
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(report, score, speeds)) + "</tr>\n"
        for score in overall
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    note = "Right: of the answers that came to their end. Minus AR: paired, with the bootstrap's 95% interval."
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}</table></div>\n<p class="note">{note}</p>'


def _cells(report: EvalReport, score: Score, speeds: dict[str, float]) -> list[str]:
    found = report.against_baseline(score)
    against = f"{found.difference:+.0%} ({found.interval[0]:+.0%} to {found.interval[1]:+.0%})"
    return [
        score.mode,
        score.right,
        "" if score.interval is None else "{:.0%} to {:.0%}".format(*score.interval),
        str(score.num_truncated),
        "" if score.mode == BASELINE or not score.num_scored else against,
        "" if score.equal_share is None else f"{score.equal_share:.0%}",
        f"{score.tokens_per_s:.1f}",
        f"{speeds[score.mode]:.2f}" if score.mode in speeds else "",
        f"{score.tokens_per_forward:.2f}",
    ]


def _render_domains(report: EvalReport) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("domain", "mode", *DOMAIN_HEADINGS))
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n" for cells in report.domain_rows()
    )
    table = f'<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}</table></div>'
    return f"<h2>Speed by domain</h2>\n{table}"


def _render_curve(overall: Sequence[Score]) -> str:
    if not any(score.num_scored for score in overall):
        return ""
    # Without a complete answer nothing is known of a mode's accuracy.
    shown = [score for score in overall if score.num_graded]
    left_out = ", ".join(score.mode for score in overall if score not in shown)
    note = "Up and right is better. Bars: 95% intervals." + (f" All answers cut off: {left_out}." if left_out else "")
    return show_picture("Accuracy against speed", _draw_curve(shown), note)


def _draw_curve(shown: Sequence[Score]) -> bytes:
    def draw(axes: "Axes") -> None:
        for idx, score in enumerate(shown):
            assert score.interval is not None
            assert score.accuracy is not None
            low, high = score.interval
            ends = [[max(0.0, score.accuracy - low)], [max(0.0, high - score.accuracy)]]
            axes.errorbar(
                [score.tokens_per_s],
                [score.accuracy],
                yerr=ends,
                fmt=MARKERS[idx % len(MARKERS)],
                color="black" if score.mode == BASELINE else f"C{idx}",
                markersize=9,
                capsize=3,
                label=score.mode,
            )
        axes.set(xlabel="answer tokens a second", ylabel="share of complete answers right", ylim=(-0.03, 1.03))
        axes.set_xlim(left=0)
        if shown:
            place_legend(axes)

    return draw_png(draw)


def _render_acceptance(answers: Sequence[Answer]) -> str:
    drafted, accepted = (_add(getattr(answer, name) for answer in answers) for name in _OFFSETS)
    if not drafted:
        return ""
    shares = [right / count for right, count in zip(accepted, drafted, strict=True)]

    def draw(axes: "Axes") -> None:
        axes.bar(range(1, len(shares) + 1), shares, color="0.6", edgecolor="black")
        axes.set(xlabel="place after the anchor", ylabel="share of drafts accepted", ylim=(0, 1))

    return show_picture(
        "Acceptance by place in the block", draw_png(draw), f"{drafted[0]} drafts in verified decoding."
    )


_OFFSETS = ("drafted_by_offset", "accepted_by_offset")


def _add(counts: Any) -> list[int]:
    total: list[int] = []
    for row in counts:
        total += [0] * (len(row) - len(total))
        for place, value in enumerate(row):
            total[place] += value
    return total


def _render_losses(losses: Sequence[dict[str, Any]]) -> str:
    if not losses:
        return ""

    def draw(axes: "Axes") -> None:
        for name, style in (("diffusion_loss", "-"), ("ar_loss", "--")):
            points = [(line["step"], line[name]) for line in losses if line.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, color="black", label=name.replace("_", " "))
        axes.set(xlabel="step", ylabel="cross-entropy, nats")
        axes.legend(fontsize=8)

    return show_picture("Training", draw_png(draw), "")


_GRADES = {True: ", right", False: ", not right", None: ""}


def _render_samples(answers: Sequence[Answer], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    traced = [answer for answer in answers if answer.reveal_passes]
    chosen = list({answer.mode: answer for answer in reversed(traced)}.values())[::-1][:MAX_SAMPLES]
    if not chosen:
        return ""
    most = max(max(answer.reveal_passes) for answer in chosen)
    key = "".join(f'<span style="--h:{_hue(place)}">{place + 1}</span>' for place in range(most + 1))
    shown = "\n".join(
        f"<p><strong>{escape(answer.mode)}</strong>{_GRADES[answer.correct]}</p>\n"
        f'<p class="answer">{_colour(answer, tokenizer)}</p>'
        for answer in chosen
    )
    return f'<h2>Answers as they were denoised</h2>\n<p class="key"><b>pass of the block:&nbsp;</b>{key}</p>\n{shown}'


def _colour(answer: Answer, tokenizer: Tokenizer) -> str:
    pieces = []
    for place, number in enumerate(answer.reveal_passes):
        before, after = (tokenizer.decode(answer.token_ids[:end]) for end in (place, place + 1))
        pieces.append(
            f'<span style="--h:{_hue(number)}" title="pass {number + 1}">{escape(after[len(before) :])}</span>'
        )
    return "".join(pieces)


def _hue(number: int) -> int:
    return 220 - 27 * number % 360


def _render_about(about: Any) -> str:
    rows = "".join(
        f'<tr><td>{escape(str(name))}</td><td class="wide">{escape(_show(value))}</td></tr>'
        for name, value in dict(about).items()
    )
    return f'<h2>What was compared</h2>\n<div class="scroll"><table>{rows}</table></div>'


def _show(value: Any) -> str:
    """A value of the report as people write it."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_show(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_show(part) for part in value)
    return str(value)
