"""One honest run for all audit tests: a tiny hub model, a hub data set, a chat file, generated text, and a resume."""

import asyncio
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pydantic

from ar2diff.audit.live.server import LiveServer
from ar2diff.clock import SystemClock
from ar2diff.data.config import DataConfig, EvaluationShare, SourceShare
from ar2diff.engine.engine import Engine
from ar2diff.export.export import ExportOptions, export_model
from ar2diff.models.loading import load_model, save_model
from ar2diff.pipelines.evaluation import evaluate_run
from ar2diff.pipelines.recipe import BaseConfig, EvaluationConfig, Recipe
from ar2diff.pipelines.run import run_recipe
from ar2diff.pipelines.served_answers import ServedEngine
from ar2diff.pipelines.stages import RunContext, fetch_base, prepare_data, write_documents
from ar2diff.provenance.environment import describe_session, describe_stage
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, find_events
from ar2diff.provenance.signing import HeadSigner
from ar2diff.provenance.unpickling import UnpicklingWatch
from ar2diff.serve.log import JsonLog
from ar2diff.serve.server import Server, open_socket
from ar2diff.serve.service import Service
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


def open_run(folder: Path, signer: HeadSigner, watch: UnpicklingWatch) -> Ledger:
    """The run's ledger, as a command opens it."""
    return Ledger.open(
        folder,
        clock=SystemClock(),
        run_id="tiny",
        signer=signer,
        session=describe_session(ENVIRON),
        look_around=lambda: describe_stage(ENVIRON, watch.list_classes()),
    )


def build_context(scratch: Path, ledger: Ledger, hub: LoopbackHub) -> RunContext:
    """What the stages work with."""
    return RunContext(
        run_dir=ledger.path.parent,
        cache_dir=scratch / "cache",
        library_dir=scratch / "library",
        ledger=ledger,
        clock=SystemClock(),
        view=SilentView(),
        endpoint=hub.endpoint,
    )


def keep(recipe: Recipe) -> Recipe:
    """The recipe as it is."""
    return recipe


def make_run(scratch: Path, *, interrupt: bool = True, change: Callable[[Recipe], Recipe] = keep) -> MadeRun:
    """Run the changed recipe into `scratch/run`, stopped after three steps and resumed where `interrupt` is set."""
    folder, signer, watch = scratch / "run", HeadSigner.generate(), UnpicklingWatch()
    with LoopbackHub() as hub:
        recipe = change(build_recipe(hub, scratch))
        for resume in (False, True) if interrupt else (False,):
            with open_run(folder, signer, watch) as ledger:
                stop = StopAfter(3) if interrupt and not resume else StopAfter(100)
                context = build_context(scratch, ledger, hub)
                run_recipe(recipe, context, resume=resume, watch_for_stop=lambda stop=stop: nullcontext(stop))
    return MadeRun(folder, signer)


def train_with_two_ranks(
    scratch: Path, *, interrupt: bool = False, change: Callable[[Recipe], Recipe] = keep
) -> MadeRun:
    """Fetch and prepare here, then train with two processes that torchrun starts, as a user does; no evaluation."""
    folder, signer, watch = scratch / "run", HeadSigner.open(scratch / "ar2diff/ledger_key.pem"), UnpicklingWatch()
    with LoopbackHub() as hub:
        recipe = change(build_recipe(hub, scratch))
        with open_run(folder, signer, watch) as ledger:
            context = build_context(scratch, ledger, hub)
            prepare_data(recipe.data, fetch_base(recipe.base, context), context)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ar2diff", "train"]
    flags = {"data": folder / "data", "out": folder, "steps": 4, "micro": 1, "accum": 2, "row-len": 640}
    flags |= {"save-every": 2, "block-size": 4, "seed": recipe.train.seed}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")}
    for more in ([], ["--init", str(folder / "checkpoints/step-000002")]) if interrupt else ([],):
        subprocess.run(
            [sys.executable, "-m", *launch, str(folder / "base"), *words, *more],
            check=True,
            capture_output=True,
            env={**kept, "XDG_CONFIG_HOME": str(scratch)},
        )
    return MadeRun(folder, signer)


def train_on_adapter(scratch: Path, *, interrupt: bool = True, change: Callable[[Recipe], Recipe] = keep) -> MadeRun:
    """A run that begins at a stored adapter: the one that a first, shorter run of the same settings has trained."""

    def shorten(recipe: Recipe) -> Recipe:
        recipe = change(recipe)
        training = replace(recipe.train, steps=4, optim=replace(recipe.train.optim, lr=0.05))
        data = replace(recipe.data, sources=recipe.data.sources[:1])
        return replace(recipe, train=training, data=data, evaluate=replace(recipe.evaluate, problems=()))

    def begin_there(recipe: Recipe) -> Recipe:
        recipe = change(recipe)
        return replace(recipe, base=replace(recipe.base, adapter=f"local:{scratch / 'adapter'}"))

    (scratch / "first").mkdir()
    first = make_run(scratch / "first", interrupt=False, change=shorten)
    newest = sorted((first.folder / "checkpoints").glob("step-*"))[-1]
    export_model(newest, "adapter", scratch / "adapter", ExportOptions())
    return make_run(scratch, interrupt=interrupt, change=begin_there)


@contextmanager
def serving(checkpoint: Path, log: Path) -> Iterator[str]:
    """A real server of a checkpoint in a thread, which keeps a request log; its address."""
    count = itertools.count()
    with log.open("a", buffering=1) as stream:
        service = Service(
            "tiny",
            lambda: Engine(load_model(checkpoint), clock=SystemClock()),
            clock=SystemClock(),
            log=JsonLog(lambda line: None, SystemClock()),
            draw_seed=lambda: 1,
            new_id=lambda: f"{next(count):024x}",
            request_log=JsonLog(stream.write, SystemClock()),
        )
        listening = open_socket("127.0.0.1", 0)
        server = Server(service)
        service.worker.start()
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            while service.worker.state == "loading" or not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.ask_to_stop()
            server.ask_to_stop()
            thread.join()
            service.worker.join(15)
            listening.close()


def evaluate_over_server(made: MadeRun, scratch: Path) -> None:
    """Ask a server of the run's checkpoint everything again, as `ar2diff evaluate --server` does."""
    run, log = made.folder, scratch / "requests.jsonl"
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    settings = find_events(run / LEDGER_NAME, "recipe_started")[-1].data["recipe"]["evaluate"]
    config = pydantic.TypeAdapter(EvaluationConfig).validate_python(settings)
    config = replace(config, thresholds=(0.5,))
    with (
        LoopbackHub() as hub,
        serving(checkpoint, log) as url,
        open_run(run, made.signer, UnpicklingWatch()) as ledger,
    ):
        served = ServedEngine(LiveServer(url), checkpoint, log=log)
        evaluate_run(run / "base", checkpoint, config, build_context(scratch, ledger, hub), served=served)
        write_documents(run)


def copy_run(run: Path, target: Path) -> Path:
    """A copy whose files are hard links: whoever changes one writes a new file."""
    shutil.copytree(run, target, copy_function=lambda a, b: Path(b).hardlink_to(a))
    for name in ("ledger.jsonl", "checkpoints.dsse.jsonl"):  # these grow in place
        (target / name).unlink()
        shutil.copyfile(run / name, target / name)
    return target
