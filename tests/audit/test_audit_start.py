"""A run that began at a stored adapter passes the whole audit; whoever tells another beginning of it does not."""

import json
import shutil

import pytest
from clean_runs import ON_ADAPTER, VARIANTS
from made_run import copy_run, train_on_adapter
from safetensors.numpy import load_file
from start_forgeries import (
    ADAPTER,
    ADAPTER_CONFIG,
    DIFFUSION,
    EMBEDDING,
    FORGERIES,
    MASK_ID,
    MASK_ROW,
    MODEL,
    OTHER_RECIPE,
    ROOT_STORED,
    SECTION,
    applied_of,
    begin_at_base,
    change_adapter,
    digests_of,
    refit,
    rename,
    spoil,
)
from tampering import forge, of_type, put, read_events

from ar2diff.audit.report import render_text
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.table import CLAIMS, REPLAY_ID
from ar2diff.audit.tensor_files import list_model_tensors, list_tensors, read_row
from ar2diff.audit.verify import audit_run
from ar2diff.provenance.documents import RENDERERS
from ar2diff.provenance.ledger import LEDGER_NAME, read_ledger
from ar2diff.provenance.statements import list_stage_statements
from ar2diff.sources import shipped


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory):
    return train_on_adapter(tmp_path_factory.mktemp("on_adapter"), change=ON_ADAPTER)


@pytest.fixture
def run(adapter_run, tmp_path):
    return copy_run(adapter_run.folder, tmp_path / "run")


def failed(claim: ClaimResult):
    return [check.what for check in claim.checks if check.verdict == "fail"]


@pytest.fixture(scope="module")
def report(adapter_run):
    return audit_run(adapter_run.folder, deep=True, server="auto", replay=6)


def test_an_honest_run_on_an_adapter_passes_every_claim(report):
    verdicts = {claim.id: claim.verdict for claim in report.claims}
    assert verdicts == dict.fromkeys((*CLAIMS, REPLAY_ID), "pass"), render_text(report)
    assert ON_ADAPTER is VARIANTS["begun at a stored adapter"].change


def test_a_replay_begins_at_the_adapter_and_gives_the_same_bits(report):
    level = report.find(REPLAY_ID).level
    assert level.startswith("from start, ")
    assert "step 6: the same bits" in level


def test_a_replay_of_later_steps_begins_at_a_checkpoint(adapter_run):
    level = audit_run(adapter_run.folder, only=("A18",), replay=2).find(REPLAY_ID).level
    assert level.startswith("from step-000004, ")
    assert "step 6: the same bits" in level


def test_forged_records_that_fit_the_unchanged_files_pass(run, adapter_run):
    # Else what follows would show the forger's mistakes, not the audit's work.
    refit(run, adapter_run.signer)
    report = audit_run(run, only=("A3", "A4", "A10", "A11", "A12", "A18"))
    assert report.verdict == "pass", render_text(report)


@pytest.mark.parametrize("name", FORGERIES)
def test_another_story_of_the_start_fails_where_it_is_another(name, run, adapter_run):
    claim, what, act = FORGERIES[name]
    act(run, adapter_run.signer)
    found = audit_run(run, only=(claim,)).find(claim)
    assert any(what == text or (what == SECTION and text.endswith(SECTION)) for text in failed(found)), render_text(
        audit_run(run, only=(claim,))
    )


def test_another_adapter_that_all_records_name_is_found_by_training_from_it(run, adapter_run):
    spoil(ADAPTER, change_adapter)(run, adapter_run.signer)
    report = audit_run(run, only=("A3", "A10", "A11", "A12", "A18"), replay=6)
    assert [claim.id for claim in report.claims if claim.verdict == "fail"] == [REPLAY_ID], render_text(report)
    assert "step 1: diffusion_loss" in failed(report.find(REPLAY_ID))


def test_a_run_without_its_start_contradicts_nothing_and_lacks_evidence(run):
    shutil.rmtree(run / "start")
    report = audit_run(run, replay=6)
    missing = {claim.id for claim in report.claims if claim.verdict == "evidence missing"}
    assert (report.verdict, missing) == ("evidence missing", {"A3", REPLAY_ID}), render_text(report)


def test_the_ledger_alone_tells_where_training_began_without_the_files(run, adapter_run):
    shutil.rmtree(run / "start")
    begin_at_base(run, adapter_run.signer)
    assert ROOT_STORED in failed(audit_run(run, only=("A3",)).find("A3"))


@pytest.mark.parametrize("name", [MODEL, ADAPTER, ADAPTER_CONFIG, DIFFUSION, "config.json"])
def test_a_file_of_the_start_that_is_gone_is_evidence_missing(run, name):
    (run / "start" / name).unlink()
    assert audit_run(run, only=("A3",)).verdict == "evidence missing"


def test_an_adapter_of_no_recipe_lacks_evidence(run, adapter_run):
    def edit(events):
        events[:] = [event for event in events if event["type"] != "recipe_started"]

    forge(run, adapter_run.signer, edit)
    assert audit_run(run, only=("A3",)).verdict == "evidence missing"


def test_an_adapter_put_on_a_plain_run_s_base_is_no_part_of_it(copied, made_run, run):
    data = applied_of(read_events(run))

    def add(events):
        at = events.index(of_type(events, "prepare")[0])
        events.insert(at, {**events[at], "type": "adapter_applied", "data": data})

    forge(copied, made_run.signer, add)
    found = failed(audit_run(copied, only=("A3",)).find("A3"))
    assert {OTHER_RECIPE, ROOT_STORED} <= set(found)


@pytest.fixture
def install(monkeypatch, tmp_path, run, adapter_run):
    """The run as if its adapter came with this package under the name tiny; installs what it should have brought."""

    def act(name="tiny", *, version=None, **changes):
        monkeypatch.setattr(shipped, "SHIPPED_DIR", tmp_path / "shipped")
        files = {**digests_of(run / "start"), "MODEL_CARD.md": "2" * 64, **changes}
        receipt = {"files": files | {LEDGER_NAME: ""}, "tensor_root": "", "ledger": {"size": 0, "head": ""}}
        put(tmp_path / "shipped" / name / "receipt.json", json.dumps(receipt))

        def edit(events):
            rename(events, "shipped:tiny")
            if version is not None:
                for event in of_type(events, "code"):
                    event["data"]["versions"]["ar2diff"] = version

        forge(run, adapter_run.signer, edit)
        return audit_run(run, only=("A3",)).find("A3")

    return act


SHIPPED_CHECK = "files of the shipped adapter tiny"


def test_a_shipped_adapter_is_the_one_of_this_package(install):
    found = install()
    assert found.verdict == "pass", found.as_json()
    assert SHIPPED_CHECK in [check.what for check in found.checks]


def test_another_adapter_under_a_shipped_name_fails(install):
    assert failed(install(**{ADAPTER: "1" * 64})) == [SHIPPED_CHECK]


def test_the_shipped_adapter_of_another_version_lacks_evidence_where_it_differs(install):
    assert install(version="0.0.9", **{ADAPTER: "1" * 64}).verdict == "evidence missing"


def test_the_same_shipped_adapter_of_another_version_passes(install):
    assert install(version="0.0.9").verdict == "pass"


def test_a_shipped_adapter_that_is_not_installed_lacks_evidence(install):
    assert install("grand").verdict == "evidence missing"


def test_the_documents_say_from_which_adapter_training_began(adapter_run):
    run, applied = adapter_run.folder, applied_of(read_events(adapter_run.folder))
    card = (run / "MODEL_CARD.md").read_text()
    assert f"| training began at the base with the adapter | {applied['source']} |" in card
    assert f"| tensor root of the base | {applied['base_tensor_root']} |" in card
    assert f"| tensor root of the base with the adapter | {applied['tensor_root']} |" in card
    assert json.loads((run / "architecture.json").read_text())["adapters"] == [applied]
    bom = json.loads((run / "bom.cdx.json").read_text())
    (component,) = [part for part in bom["components"] if part["name"] == applied["source"]]
    digests = {file["name"]: file["hashes"][0]["content"] for file in component["components"]}
    assert digests == applied["files"]
    assert component["bom-ref"] in bom["dependencies"][0]["dependsOn"]
    facts = {fact["name"]: fact["value"] for fact in bom["metadata"]["component"]["properties"]}
    assert facts["ar2diff:base_tensor_root"] == applied["base_tensor_root"]
    assert facts["ar2diff:start_tensor_root"] == applied["tensor_root"]
    downloads = (run / "DOWNLOADS.md").read_text()
    assert all(f"| {name} | {digest} |" in downloads for name, digest in applied["files"].items())


def test_a_statement_of_the_applied_adapter_follows_from_the_base(adapter_run):
    events = list(read_ledger(adapter_run.folder / LEDGER_NAME))
    applied = applied_of(read_events(adapter_run.folder))
    (made,) = [
        statement
        for statement in list_stage_statements(events)
        if statement["predicate"]["buildDefinition"]["buildType"].endswith("/adapter_applied")
    ]
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in made["subject"]}
    assert subjects == {
        **{f"start/{name}": digest for name, digest in applied["files"].items()},
        "start (tensor root)": applied["tensor_root"],
    }
    build = made["predicate"]["buildDefinition"]
    assert build["externalParameters"] == {"source": applied["source"]}
    assert any(material["name"] == "base/model.safetensors" for material in build["resolvedDependencies"])


def test_documents_of_a_run_without_an_adapter_say_nothing_of_one(made_run):
    events = list(read_ledger(made_run.folder / LEDGER_NAME))
    for render in RENDERERS.values():
        text = render(events)
        assert "with the adapter" not in text
        assert '"adapters"' not in text
        assert "start_tensor_root" not in text


def test_a_row_is_read_alone(run):
    (embedding,) = [tensor for tensor in list_tensors(run / "start") if tensor.name == EMBEDDING]
    (row,) = [tensor for tensor in list_model_tensors(run / "start") if tensor.name == MASK_ROW]
    assert read_row(embedding, MASK_ID) == read_row(row, 0) == load_file(run / "start" / ADAPTER)[MASK_ROW].tobytes()
    with pytest.raises(ValueError, match="none of number"):
        read_row(row, 1)
