"""The newest evaluation of a run as a page."""

import json
from pathlib import Path

from ar2diff.errors import RunError
from ar2diff.evals.page import render_page
from ar2diff.evals.report import EvalReport
from ar2diff.files import read_json, write_text
from ar2diff.models.loading import load_tokenizer
from ar2diff.pipelines.bench import SPEED_NAME
from ar2diff.pipelines.evaluation import REPORT_NAME, SAMPLES_NAME
from ar2diff.train.checkpoint import list_checkpoints
from ar2diff.train.metrics import read_metrics

PAGE_NAME = "report.html"


def write_page(run_dir: Path, path: Path | None = None, *, model: Path | None = None) -> Path:
    """Write the page, `report.html` in the run by default; returns its path.

    Args:
        model: whose tokenizer shows the samples; the run's newest checkpoint by default, and without one none are.

    Raises:
        RunError: the run has no evaluation.
    """
    samples, found = run_dir / SAMPLES_NAME, [model] if model else list_checkpoints(run_dir)
    if not samples.is_file():
        raise RunError("the run has no evaluation to report", given=str(run_dir), fix="Run `ar2diff evaluate` first")
    lines = samples.read_text(encoding="utf-8").split("\n")
    content = read_json(run_dir / REPORT_NAME, error=RunError)
    report = EvalReport.from_json(content, (json.loads(line) for line in lines if line))
    speed = run_dir / SPEED_NAME
    page = render_page(
        report,
        load_tokenizer(found[-1]) if found else None,
        read_metrics(run_dir),
        title=f"{run_dir.resolve().name}: beside its parent",
        speed=read_json(speed, error=RunError) if speed.is_file() else None,
    )
    path = path or run_dir / PAGE_NAME
    write_text(path, page)
    return path
