"""`ar2diff report RUN`: the newest evaluation of a run as one page."""

from pathlib import Path


def report(run: Path, *, out: Path | None = None, model: Path | None = None) -> None:
    """Write a page: accuracy against speed, acceptance, losses, and answers as they were denoised.

    Args:
        run: The run directory.
        out: The page; report.html in the run by default.
        model: Whose tokenizer shows the samples; the run's newest checkpoint by default.
    """
    from ar2diff.pipelines.report_page import write_page

    print(f"wrote {write_page(run, out, model=model)}")
