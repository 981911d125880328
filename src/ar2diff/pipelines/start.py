"""Where a run's training begins: at the fetched base, or at what a stored adapter makes of it.

With `[base] adapter` the run puts that adapter on its base in RUN/start and trains it on. `adapter_applied` in the
ledger says which files were put on which base, and what came out. Evaluation compares with the base itself.
"""

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ar2diff.errors import ConfigError, ModelError, RunError
from ar2diff.hashing import sha256_file, tensor_root
from ar2diff.models.adapter_file import ADAPTER_WEIGHTS_NAME, EXPORTED_NAMES, StoredAdapter, read_exported
from ar2diff.models.apply import apply_adapter
from ar2diff.models.config import DiffusionConfig
from ar2diff.models.roots import digest_tensor
from ar2diff.models.safetensors_file import read_file, read_tensors
from ar2diff.pipelines.recipe import BaseConfig, Recipe
from ar2diff.pipelines.stages import LOCAL_PREFIX, RunContext
from ar2diff.provenance.environment import APPLIED_EVENT
from ar2diff.provenance.ledger import LEDGER_NAME, find_events
from ar2diff.sources.shipped import SHIPPED_PREFIX, find_shipped
from ar2diff.train.config import TrainConfig

START_DIR = "start"
# What an adapter was trained for; with other values its next step would be training of something else.
OBJECTIVE_NAMES = ("anchor", "shift_logits", "clean_attention")


class FoundAdapter(NamedTuple):
    """An adapter's folder, and the tensor root that it must give its base, where that is recorded."""

    folder: Path
    tensor_root: str | None


def find_adapter(source: str) -> FoundAdapter:
    """An adapter, by what a recipe calls it; a plain path is one too.

    Raises:
        ConfigError, SourceError, LedgerError: as `find_shipped`.
    """
    if source.startswith(SHIPPED_PREFIX):
        return FoundAdapter(*find_shipped(source.removeprefix(SHIPPED_PREFIX)))
    return FoundAdapter(Path(source.removeprefix(LOCAL_PREFIX)), None)


def check_adapter(recipe: Recipe, run_dir: Path) -> None:
    """Refuse, before anything is fetched, an adapter that is not there or that the recipe would train as another.

    Raises:
        ConfigError: rank, scale or places are not those of `train.adapter`, or anchor, shift or clean attention not
            those of `train.objective`; or there is no such adapter.
        ModelError: its files are missing, damaged or foreign.
        SourceError, LedgerError: a shipped adapter's files were changed.
    """
    if recipe.base.adapter is None:
        return
    start = run_dir / START_DIR
    applied = _find_applied(run_dir) is not None and start.is_dir()
    stored, diffusion = read_exported(start if applied else find_adapter(recipe.base.adapter).folder)
    _check_settings(stored, diffusion, recipe.train, recipe.base.adapter)


def make_start(config: BaseConfig, base: Path, context: RunContext) -> Path:
    """The folder or file that training begins at; RUN/start is made from the adapter, or kept where it is whole.

    Raises:
        ModelError: the adapter is of another base, or makes another model of it than was recorded, or is damaged.
        RunError: RUN/start was changed, or the adapter is another one than the run began with.
    """
    if config.adapter is None:
        return base
    folder = context.run_dir / START_DIR
    applied = _find_applied(context.run_dir)
    if applied is not None and folder.is_dir():
        context.view.stage("Applying the adapter: done already")
        _verify(folder, applied)
        return folder
    context.view.stage("Applying the adapter")
    adapter, recorded_root = find_adapter(config.adapter)
    if applied is not None and applied["files"] != _digests(adapter):
        raise RunError(
            "the adapter is another one than this run began with",
            given=config.adapter,
            fix="Restore it, or choose another folder for the run",
        )
    made = apply_adapter(base, adapter, folder, tensor_root=recorded_root)
    if applied is None:
        roots = {"base_tensor_root": made.base_tensor_root, "tensor_root": made.tensor_root}
        data = {"source": config.adapter, "folder": START_DIR, "files": made.files, **roots}
        context.ledger.append(APPLIED_EVENT, data)
    return folder


def _find_applied(run_dir: Path) -> dict[str, Any] | None:
    found = find_events(run_dir / LEDGER_NAME, APPLIED_EVENT)
    return found[-1].data if found else None


def _check_settings(stored: StoredAdapter, diffusion: DiffusionConfig, train: TrainConfig, source: str) -> None:
    if stored.config != train.adapter:
        raise ConfigError(
            "train.adapter has other settings than the stored adapter",
            given=f"{train.adapter}, {source}: {stored.config}",
            fix="Repeat the stored settings",
        )
    for name in OBJECTIVE_NAMES:
        asked, trained = getattr(train.objective, name), getattr(diffusion, name)
        if asked != trained:
            raise ConfigError(
                f"the stored adapter was trained with another {name}",
                given=f"{asked}, {source}: {trained}",
                fix=f"Set {name} of train.objective to that of the adapter",
            )


def _verify(folder: Path, applied: dict[str, Any]) -> None:
    try:
        tensors = chain(read_tensors(folder), read_file(folder / ADAPTER_WEIGHTS_NAME))
        root = tensor_root(digest_tensor(name, tensor) for name, tensor in tensors)
        same = (root, _digests(folder)) == (applied["tensor_root"], applied["files"])
    except (ModelError, FileNotFoundError):
        same = False
    if not same:
        fix = "Remove the folder: the same command makes it again"
        raise RunError("the model that training begins at was changed", given=str(folder), fix=fix)


def _digests(folder: Path) -> dict[str, str]:
    return {name: sha256_file(folder / name) for name in EXPORTED_NAMES}
