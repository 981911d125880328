"""The export targets that a training left open are in the ledger once, and are those that export itself accepts."""

import pytest

from ar2diff.clock import SystemClock
from ar2diff.errors import Ar2diffError
from ar2diff.export.export import check_open
from ar2diff.export.matrix import TARGETS
from ar2diff.export.source import ExportSource
from ar2diff.models.adapters import AdapterConfig, GatedAdapter
from ar2diff.models.loading import save_model
from ar2diff.pipelines.targets import TARGETS_EVENT, describe_targets, record_targets
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, find_events
from ar2diff.testing.models import MASK_ID, tiny_diffusion, tiny_model


@pytest.fixture(params=["plain", "adapter"])
def checkpoint(request, tmp_path):
    model = tiny_model(3, diffusion=tiny_diffusion(shift_logits=False, clean_attention="block"))
    if request.param == "adapter":
        GatedAdapter(model.decoder, AdapterConfig(rank=2), mask_token_id=MASK_ID, seed=0)
    save_model(tmp_path / "step-000001", model, model.diffusion)
    return tmp_path / "step-000001"


def accepts(folder, target, *, merge):
    try:
        source = ExportSource(folder, merge=merge)
        check_open(source, target)
    except Ar2diffError:
        return False
    return target != "adapter" or (source.adapter is not None and not merge)


def test_what_is_recorded_is_what_export_accepts(checkpoint):
    said = describe_targets(checkpoint)
    assert set(said["open"]) | set(said["closed"]) == set(TARGETS)
    for target in TARGETS:
        needs_merge = target in said["need_merge"]
        assert accepts(checkpoint, target, merge=needs_merge) == (target in said["open"]), target
        if needs_merge:
            assert not accepts(checkpoint, target, merge=False)
    assert all(said["closed"].values())
    assert said["checkpoint"] == "step-000001"


def test_the_ledger_says_it_once(checkpoint, tmp_path):
    with Ledger.open(tmp_path / "run", clock=SystemClock(), run_id="run") as ledger:
        record_targets(checkpoint, ledger)
        record_targets(checkpoint, ledger)
        (event,) = find_events(tmp_path / "run" / LEDGER_NAME, TARGETS_EVENT)
    assert event.data == describe_targets(checkpoint)
