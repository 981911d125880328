"""How recipes are run; a finished, signed run of a tiny adapter, and a place that it is shipped into."""

import shutil
import tomllib
from dataclasses import replace

import pytest
from watcher import Watcher

from ar2diff.clock import SystemClock
from ar2diff.models.adapters import AdapterConfig
from ar2diff.pipelines.recipe import parse_recipe
from ar2diff.pipelines.run import run_recipe
from ar2diff.pipelines.ship import ship_adapter
from ar2diff.pipelines.stages import RunContext
from ar2diff.provenance.ledger import Ledger
from ar2diff.provenance.signing import HeadSigner
from ar2diff.sources import shipped
from ar2diff.train.objective import ObjectiveConfig

FROZEN = ObjectiveConfig(block_sizes=(4,), ar_weight=0.0, anchor="last")


@pytest.fixture(scope="session")
def execute(tiny_hub, tmp_path_factory):
    """Runs a recipe into a folder, its sources from the loopback hub; the ledger's heads are signed by `signer`."""
    cache = tmp_path_factory.mktemp("cache")

    def run(recipe, run_dir, *, view=None, signer=None, **options):
        with Ledger.open(run_dir, clock=SystemClock(), run_id="tiny", signer=signer) as ledger:
            context = RunContext(
                run_dir=run_dir,
                cache_dir=cache,
                library_dir=cache / "native",
                ledger=ledger,
                clock=SystemClock(),
                view=view or Watcher(),
                endpoint=tiny_hub.endpoint,
            )
            return run_recipe(recipe, context, **options)

    return run


@pytest.fixture(scope="module")
def adapter_recipe(tiny_hub):
    plain = parse_recipe(tomllib.loads(tiny_hub.recipe_text()))
    return replace(plain, train=replace(plain.train, adapter=AdapterConfig(rank=2, alpha=4.0), objective=FROZEN))


@pytest.fixture(scope="module")
def signed_run(adapter_recipe, execute, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    execute(adapter_recipe, folder, signer=HeadSigner.generate())
    return folder


@pytest.fixture
def run_copy(signed_run, tmp_path):
    return shutil.copytree(signed_run, tmp_path / "run")


@pytest.fixture
def into(tmp_path, monkeypatch):
    """An empty place for shipped adapters, which the package then takes for its own."""
    monkeypatch.setattr(shipped, "SHIPPED_DIR", tmp_path / "shipped")
    return tmp_path / "shipped"


@pytest.fixture
def shipped_adapter(signed_run, into):
    """The folder of a shipped adapter, to be spoilt."""
    return ship_adapter(signed_run, "tiny", into)
