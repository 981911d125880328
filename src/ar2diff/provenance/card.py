"""MODEL_CARD.md: what the model is, from the ledger alone, so that it can be rendered again and compared."""

from collections.abc import Iterable, Sequence
from typing import Any

from ar2diff.provenance.environment import APPLIED_EVENT
from ar2diff.provenance.ledger import LedgerEvent

CARD_NAME = "MODEL_CARD.md"
LIMITS = (
    "Who controls the machine and the signing key can fabricate a whole consistent run. A ledger head that was "
    "published elsewhere at the time, and `ar2diff audit --replay N` on another machine, make that harder.",
    "That no credential was used is shown by names of variables and headers alone.",
    "That evaluation items are absent is shown for their texts, not for rewordings that share no run of words.",
    "The audit says nothing about what the model answers: errors, bias and harm are not examined.",
)


def render_card(events: Iterable[LedgerEvent]) -> str:
    """The card as Markdown, with the front matter that hubs read."""
    last = {event.type: event.data for event in events}
    started, finished = last.get("train_started", {}), last.get("train_finished") or last.get("train_interrupted", {})
    run_id = last.get("run_started", {}).get("run_id")
    lines = [
        *_front_matter(),
        f"# {_text(run_id)}",
        "",
        "A block-diffusion language model made with ar2diff from an autoregressive one. This card is generated from",
        "the run's `ledger.jsonl`; `ar2diff audit` renders it again and compares every byte.",
        *_section("Model", _model_rows(started, finished, last.get(APPLIED_EVENT))),
        *_section("Training", _training_rows(started, finished)),
        *_data_section(last.get("prepare", {})),
        *_section("Evaluation", _evaluation_rows(last.get("evaluate"))),
        *_export_section(last.get("export_targets")),
        "",
        "## What an audit cannot show",
        "",
        *(f"- {limit}" for limit in LIMITS),
    ]
    return "\n".join(lines) + "\n"


def _front_matter() -> list[str]:
    return [
        "---",
        "pipeline_tag: text-generation",
        "library_name: ar2diff",
        "tags: [block-diffusion, ar2diff]",
        "---",
        "",
    ]


def _model_rows(
    started: dict[str, Any], finished: dict[str, Any], applied: dict[str, Any] | None
) -> list[tuple[str, object]]:
    return [
        ("base", started.get("base")),
        ("tensor root of the base", (started if applied is None else applied).get("base_tensor_root")),
        *_start_rows(applied),
        ("checkpoint", finished.get("checkpoint")),
        ("tensor root", finished.get("tensor_root")),
        ("block size", started.get("block_size")),
        ("mask token", f"{started.get('mask_token')} ({started.get('mask_token_id')})" if started else None),
        ("logits shifted by one", started.get("shift_logits")),
    ]


def _start_rows(applied: dict[str, Any] | None) -> list[tuple[str, object]]:
    """Where training began, if not at the base itself."""
    if applied is None:
        return []
    return [
        ("training began at the base with the adapter", applied.get("source")),
        ("tensor root of the base with the adapter", applied.get("tensor_root")),
    ]


def _training_rows(started: dict[str, Any], finished: dict[str, Any]) -> list[tuple[str, object]]:
    config = started.get("config") or {}
    return [
        ("steps", finished.get("step")),
        ("seconds", finished.get("elapsed_s")),
        ("rows a step", _product(config.get("micro"), config.get("accum"))),
        ("tokens a row", config.get("row_len")),
        ("seed", config.get("seed")),
        ("sha256 of the step log", finished.get("metrics_sha256")),
    ]


def _data_section(prepared: dict[str, Any]) -> list[str]:
    lines = ["", "## Data", ""]
    sources = prepared.get("sources") or []
    if not sources:
        return [*lines, "No data was prepared in this run."]
    lines += ["| source | rows | documents | tokens |", "|---|---:|---:|---:|"]
    for source in sources:
        numbers = " | ".join(_number(source.get(name)) for name in ("rows", "documents", "tokens"))
        lines.append(f"| {_text(source.get('source'))} | {numbers} |")
    kept_out = prepared.get("decontamination") or {}
    removed = kept_out.get("removed")
    return [
        *lines,
        "",
        f"Kept out of training: {_number(kept_out.get('num_items'))} evaluation items; rows removed for them: "
        f"{_text(removed)}.",
    ]


def _evaluation_rows(evaluated: dict[str, Any] | None) -> list[tuple[str, object]]:
    if evaluated is None:
        return [("evaluated", "no")]
    roots, report, samples = (evaluated.get(name) or {} for name in ("roots", "report", "samples"))
    return [
        ("tensor root of the evaluated model", roots.get("converted")),
        ("scores", f"{report.get('path')} (sha256 {report.get('sha256')})"),
        ("every answer", f"{samples.get('path')} (sha256 {samples.get('sha256')})"),
    ]


def _export_section(targets: dict[str, Any] | None) -> list[str]:
    """What the model can be exported to; runs of earlier versions do not say."""
    if targets is None:
        return []
    merged, closed = targets.get("need_merge") or [], targets.get("closed") or {}
    names = (f"{_text(name)}{' (with --merge)' if name in merged else ''}" for name in targets.get("open") or [])
    return [
        "",
        "## Export",
        "",
        f"Open to `ar2diff export`: {', '.join(names) or 'nothing'}.",
        *([""] if closed else []),
        *(f"- {_text(name)} is closed: {_text('; '.join(map(str, why)))}." for name, why in closed.items()),
    ]


def _section(title: str, rows: Sequence[tuple[str, object]]) -> list[str]:
    return ["", f"## {title}", "", "| | |", "|---|---|", *(f"| {name} | {_text(value)} |" for name, value in rows)]


def _product(one: object, other: object) -> int | None:
    return one * other if isinstance(one, int) and isinstance(other, int) else None


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else _text(value)


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    return " ".join(str(value).split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
