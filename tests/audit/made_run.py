"""One honest run for all audit tests: a tiny hub model, a hub data set, a chat file, generated text, and a resume."""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from ar2diff.clock import SystemClock
from ar2diff.data.config import DataConfig, EvaluationShare, SourceShare
from ar2diff.models.loading import save_model
from ar2diff.pipelines.recipe import BaseConfig, EvaluationConfig, Recipe
from ar2diff.pipelines.run import run_recipe
from ar2diff.pipelines.stages import RunContext
from ar2diff.provenance.environment import describe_session, describe_stage
from ar2diff.provenance.ledger import Ledger
from ar2diff.provenance.signing import HeadSigner
from ar2diff.provenance.unpickling import UnpicklingWatch
from ar2diff.sources.progress import SilentProgress
from ar2diff.testing.hub import LoopbackHub
from ar2diff.testing.models import tiny_model
from ar2diff.train.config import TrainConfig
from ar2diff.train.metrics import SilentTrainProgress
from ar2diff.train.objective import ObjectiveConfig

ENVIRON = {"PATH": "/bin", "HOME": "/home/me", "TOKENIZERS_PARALLELISM": "false"}


class SilentView:
    """Draws nothing."""

    download, training = SilentProgress(), SilentTrainProgress()

    def stage(self, title):
        """Nothing."""

    def data(self, source, done, total):
        """Nothing."""

    def evaluation(self, done, total, mode):
        """Nothing."""


@dataclass(frozen=True)
class MadeRun:
    """The run's folder and the key that signed it."""

    folder: Path
    signer: HeadSigner


def math_rows():
    """Rows of the math data set, three of them of the source that is skipped."""
    rows = []
    for idx in range(12):
        rows.append(
            {
                "uuid": f"row-{idx}",
                "problem": f"Problem {idx}: add the first {idx} odd numbers.",
                "source": "math" if idx % 4 == 1 else "olympiads",
                "generations": [f"The sum is {idx * idx}, since each square grows by an odd number."],
                "is_reasoning_complete": [True],
                "correctness_math_verify": [idx != 6],
            }
        )
    return rows


def model_files(folder: Path) -> dict[str, bytes]:
    """The files of a tiny model repository."""
    save_model(folder, tiny_model(3, max_seq_len=1024), None)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parquet_bytes(rows) -> bytes:
    """The rows as a parquet file."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def build_recipe(hub: LoopbackHub, scratch: Path) -> Recipe:
    """The recipe of the run."""
    base = hub.add_repo("maker/tiny", model_files(scratch / "model") | {"README.md": b"A model.\n"})
    data = hub.add_repo("maker/math", {"data/train-0.parquet": parquet_bytes(math_rows())}, dataset=True)
    chat = scratch / "chat.jsonl"
    lines = [{"prompt": f"Name a colour, number {n}.", "response": f"Colour {n} is green."} for n in range(6)]
    leaked = {"prompt": "What is the capital of the island where the blue lighthouse stands?", "response": "Port."}
    chat.write_text("".join(json.dumps(line) + "\n" for line in [*lines, leaked]))
    kept_out = scratch / "kept_out.jsonl"
    kept_out.write_text(json.dumps({**leaked, "id": "lighthouse"}) + "\n")
    return Recipe(
        base=BaseConfig(source=f"hub:maker/tiny@{base}"),
        data=DataConfig(
            sources=(
                SourceShare(source=f"hub:datasets/maker/math@{data}", recipe="openr1_math"),
                SourceShare(source=f"local:{chat}"),
                SourceShare(source="procedural:structured", count=8),
            ),
            evaluation=(EvaluationShare(task="structured", count=4),),
            blocklist_files=(str(kept_out),),
            max_document_len=640,
        ),
        train=TrainConfig(
            steps=6, micro=1, row_len=640, save_every=2, objective=ObjectiveConfig(block_sizes=(2, 4)), average_last=2
        ),
        evaluate=EvaluationConfig(
            problems=(EvaluationShare(task="structured", count=2),),
            steps=(2,),
            thresholds=(),
            max_tokens=12,
            bits_problems=1,
            precision="fp32",
        ),
    )


class StopAfter:
    """Asks a training to stop after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def make_run(
    scratch: Path, *, interrupt: bool = True, change: Callable[[Recipe], Recipe] = lambda recipe: recipe
) -> MadeRun:
    """Run the changed recipe into `scratch/run`, stopped after three steps and resumed where `interrupt` is set."""
    folder, signer, watch = scratch / "run", HeadSigner.generate(), UnpicklingWatch()
    with LoopbackHub() as hub:
        recipe = change(build_recipe(hub, scratch))
        for resume in (False, True) if interrupt else (False,):
            with Ledger.open(
                folder,
                clock=SystemClock(),
                run_id="tiny",
                signer=signer,
                session=describe_session(ENVIRON),
                look_around=lambda: describe_stage(ENVIRON, watch.list_classes()),
            ) as ledger:
                context = RunContext(
                    run_dir=folder,
                    cache_dir=scratch / "cache",
                    library_dir=scratch / "library",
                    ledger=ledger,
                    clock=SystemClock(),
                    view=SilentView(),
                    endpoint=hub.endpoint,
                )
                stop = StopAfter(3) if interrupt and not resume else StopAfter(100)
                run_recipe(recipe, context, resume=resume, watch_for_stop=lambda stop=stop: nullcontext(stop))
    return MadeRun(folder, signer)


def copy_run(run: Path, target: Path) -> Path:
    """A copy whose files are hard links: whoever changes one writes a new file."""
    shutil.copytree(run, target, copy_function=lambda a, b: Path(b).hardlink_to(a))
    for name in ("ledger.jsonl", "checkpoints.dsse.jsonl"):  # these grow in place
        (target / name).unlink()
        shutil.copyfile(run / name, target / name)
    return target
