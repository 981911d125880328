"""The bill of materials and the data description are valid by their formats' own validators, whatever was logged."""

import json

import pytest

from ar2diff.clock import SystemClock
from ar2diff.provenance.bom import render_bom
from ar2diff.provenance.card import LIMITS, render_card
from ar2diff.provenance.croissant import render_croissant
from ar2diff.provenance.environment import CODE_EVENT
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, read_ledger

DIGEST = "ab" * 32


def fetched(folder, path):
    file = {"path": path, "size_bytes": 5, "sha256": DIGEST, "url": "https://hub/x", "status": 200}
    return {"source": f"hub:maker/{folder}@{'1' * 40}", "revision": "1" * 40, "folder": folder, "files": [file]}


@pytest.fixture
def events(tmp_path):
    with Ledger.open(tmp_path, clock=SystemClock(), run_id="a | run") as ledger:
        ledger.append("fetch", fetched("base", "model.safetensors"))
        ledger.append("fetch", fetched("0", "data/train.parquet"))
        sources = [{"source": "procedural:structured", "rows": 8, "documents": 7, "tokens": 1234}]
        ledger.append("prepare", {"sources": sources, "files": {"token_ids.npy": DIGEST}})
        libraries = {"torch": {"version": "2.13.0+cpu", "files_sha256": DIGEST}}
        versions = {"ar2diff": "0.1.0", "python": "3.11", "torch": "2.13.0+cpu", "gguf": None}
        ledger.append(CODE_EVENT, {"versions": versions, "libraries": libraries})
        ledger.append("train_started", {"base": "hub:maker/base", "mask_token": "<mask>", "mask_token_id": 9})
        ledger.append("train_finished", {"checkpoint": "step-000006", "tensor_root": DIGEST, "step": 6})
    return list(read_ledger(tmp_path / LEDGER_NAME))


@pytest.fixture
def no_events(tmp_path):
    with Ledger.open(tmp_path / "empty", clock=SystemClock(), run_id="empty"):
        pass
    return list(read_ledger(tmp_path / "empty" / LEDGER_NAME))


def test_the_bill_of_materials_is_valid_cyclonedx(events, no_events):
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    check = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    for logged in (events, no_events):
        assert check.validate_str(render_bom(logged)) is None
    content = json.loads(render_bom(events))
    kinds = [component["type"] for component in content["components"]]
    assert kinds == ["machine-learning-model", "data", "library"]
    assert content["components"][0]["components"][0]["hashes"] == [{"alg": "SHA-256", "content": DIGEST}]
    assert content["components"][2]["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"


@pytest.mark.filterwarnings("ignore")
def test_the_data_description_is_valid_croissant(events):
    croissant = pytest.importorskip("mlcroissant")
    dataset = croissant.Dataset(jsonld=json.loads(render_croissant(events)))
    assert not dataset.metadata.ctx.issues.errors
    assert [file.sha256 for file in dataset.metadata.distribution] == [DIGEST, DIGEST]


def test_the_card_says_what_it_is_made_of_and_what_it_cannot_show(events):
    card = render_card(events)
    for text in ("# a \\| run", "&lt;mask> (9)", DIGEST, "step-000006", "| procedural:structured | 8 | 7 | 1,234 |"):
        assert text in card, text
    assert all(limit in card for limit in LIMITS)


def test_the_card_lists_the_open_export_targets_where_the_run_says_them(events):
    assert "## Export" not in render_card(events)
    data = {"open": ["hf", "adapter"], "need_merge": ["hf"], "closed": {"sdar": ["one", "two | three"]}}
    card = render_card([*events, events[0]._replace(type="export_targets", data=data)])
    assert "Open to `ar2diff export`: hf (with --merge), adapter." in card
    assert "- sdar is closed: one; two \\| three." in card


def test_the_same_events_give_the_same_bytes_and_later_openings_change_nothing(events):
    for render in (render_bom, render_croissant, render_card):
        assert render(events) == render(iter(events))
        assert render(events) == render([*events, events[0]._replace(type="session_started", data={})])


def test_an_empty_run_has_documents_too(no_events):
    assert "# empty" in render_card(no_events)
    assert json.loads(render_croissant(no_events))["distribution"] == []
