"""`ar2diff answers`: let a model answer the prompts of a source, as data to convert it with."""

from pathlib import Path
from typing import Literal


def answers(
    model: Path,
    *,
    source: str,
    out: Path = Path("answers"),
    fetched: tuple[Path, ...] = (),
    precision: Literal["fp32", "bf16", "int8", "auto"] = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
) -> None:
    """Answer the prompts of a source with an autoregressive model, for `ar2diff prepare`.

    Repeat it at will: a finished folder is kept, and one that was stopped goes on from its finished files with the
    same bytes. Give the same source to `ar2diff prepare`, with `--fetched` naming the folder. Answers that reach the
    limit are kept in the folder and dropped from the data.

    Args:
        model: Folder of the model, or its .gguf file.
        source: parent:SOURCE[?count=N&start=N&recipe=NAME&temperature=T&top_p=P&max_tokens=N&seed=N], such as
            parent:procedural:structured?count=500, or parent:self?count=500 where the model writes the prompts too.
        out: The folder of answers to make; `ledger.jsonl` lies beside it.
        fetched: Folders that `ar2diff fetch` made, for hub and pypi sources of prompts.
        precision: As of `ar2diff generate`.
        device: cpu or cuda.
    """
    import uuid

    import torch
    from rich.console import Console

    from ar2diff.cli.fetch import default_library_dir
    from ar2diff.cli.open_ledger import open_ledger
    from ar2diff.cli.prepare import read_fetched_source
    from ar2diff.clock import SystemClock
    from ar2diff.data.config import PARENT_PREFIX, parse_source_share
    from ar2diff.engine.loading import load_engine
    from ar2diff.errors import ConfigError
    from ar2diff.pipelines.evaluation import check_model_paths
    from ar2diff.pipelines.parent_answers import EngineParent, answer_prompts
    from ar2diff.pipelines.stages import check_device

    share = parse_source_share(source)
    if not share.is_parent:
        raise ConfigError("not answers of a parent", given=source, fix=f"Write {PARENT_PREFIX}{source}")
    check_device(device)
    check_model_paths(model)
    folders = {read_fetched_source(folder): folder for folder in fetched}
    clock, console = SystemClock(), Console(stderr=True)
    threads = torch.get_num_threads()
    engine = load_engine(
        model, precision, clock=clock, library_dir=default_library_dir(), device=device, num_threads=threads
    )
    with console.status("Answering") as status:

        def show(name: str, done: int, total: int | None) -> None:
            status.update(f"{name}: {done}" + (f" of {total}" if total else ""))

        with open_ledger(out.absolute().parent, clock=clock, run_id=uuid.uuid4().hex) as ledger:
            receipt = answer_prompts(share, EngineParent(engine), out, fetched=folders, ledger=ledger, progress=show)
    ends = ", ".join(f"{reason}: {rows}" for reason, rows in receipt["finish_reasons"].items())
    console.print(f"{receipt['rows']} answers in {out} ({ends})", highlight=False, soft_wrap=True)
