"""A shipped adapter is found by its name, checked, applied and trained on; a changed one never is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rewriting import change_data, edit_receipt, flip, rewrite

from ar2diff.cli import run as run_command
from ar2diff.errors import ConfigError, LedgerError, ModelError, SourceError
from ar2diff.hashing import sha256_file
from ar2diff.models.adapter_file import EXPORTED_NAMES
from ar2diff.models.loading import load_model
from ar2diff.pipelines.ship import KEPT_NAMES, ship_adapter
from ar2diff.provenance.ledger import LEDGER_NAME, find_events, read_ledger
from ar2diff.provenance.signing import HeadSigner
from ar2diff.sources import shipped
from ar2diff.train.checkpoint import list_checkpoints


def test_a_shipped_adapter_is_found_applied_and_trained_on(
    signed_run, shipped_adapter, adapter_recipe, execute, tmp_path, capsys
):
    root = load_model(list_checkpoints(signed_run)[-1]).tensor_root
    assert shipped.list_shipped() == ["tiny"]
    assert shipped.find_shipped("tiny") == (shipped_adapter, root)
    assert run_command(["apply", str(signed_run / "base"), "shipped:tiny", "--out", str(tmp_path / "out")]) == 0
    assert root in capsys.readouterr().out
    assert load_model(tmp_path / "out").tensor_root == root
    asked = replace(adapter_recipe, base=replace(adapter_recipe.base, adapter="shipped:tiny"))
    execute(replace(asked, evaluate=replace(asked.evaluate, problems=())), tmp_path / "on")
    (applied,) = find_events(tmp_path / "on" / LEDGER_NAME, "adapter_applied")
    assert (applied.data["source"], applied.data["tensor_root"]) == ("shipped:tiny", root)
    (started,) = find_events(tmp_path / "on" / LEDGER_NAME, "train_started")
    assert started.data["base_tensor_root"] == root


def test_an_adapter_that_was_trained_on_ships_for_the_base_itself(
    shipped_adapter, adapter_recipe, execute, into, tmp_path
):
    asked = replace(adapter_recipe, base=replace(adapter_recipe.base, adapter="shipped:tiny"))
    execute(asked, tmp_path / "on", signer=HeadSigner.generate())
    again = ship_adapter(tmp_path / "on", "tiny-on", into)
    receipts = [json.loads((folder / "receipt.json").read_text()) for folder in (shipped_adapter, again)]
    assert receipts[0]["base_tensor_root"] == receipts[1]["base_tensor_root"]
    assert receipts[0]["tensor_root"] != receipts[1]["tensor_root"]
    assert shipped.list_shipped() == ["tiny", "tiny-on"]


@pytest.mark.parametrize("name", [*EXPORTED_NAMES, *KEPT_NAMES])
@pytest.mark.parametrize("spoil", [flip, Path.unlink], ids=["changed", "missing"])
def test_a_shipped_file_that_was_changed_is_never_applied(shipped_adapter, signed_run, tmp_path, name, spoil):
    spoil(shipped_adapter / name)
    with pytest.raises(SourceError, match=f"{name} of a shipped adapter is missing or was changed"):
        shipped.find_shipped("tiny")
    assert run_command(["apply", str(signed_run / "base"), "shipped:tiny", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_file_that_the_receipt_does_not_know_is_refused(shipped_adapter):
    (shipped_adapter / "extra.txt").write_text("x")
    with pytest.raises(SourceError, match=r"extra.txt of a shipped adapter is not in its receipt"):
        shipped.find_shipped("tiny")


def without_ledger(folder):
    edit_receipt(folder, files={name: sha256_file(folder / name) for name in EXPORTED_NAMES})


RECEIPTS = {
    "no JSON": (lambda folder: (folder / "receipt.json").write_text("{"), "not a readable JSON"),
    "a list": (lambda folder: (folder / "receipt.json").write_text("[]"), "lists no files"),
    "no files": (lambda folder: edit_receipt(folder, files=None), "lists no files"),
    "no ledger among them": (without_ledger, "lists no files"),
    "no state of the ledger": (lambda folder: edit_receipt(folder, ledger=None), "names no model"),
    "another root": (lambda folder: edit_receipt(folder, tensor_root="5" * 64), "names another model"),
}


@pytest.mark.parametrize("name", RECEIPTS)
def test_a_receipt_that_says_something_else_is_refused(shipped_adapter, name):
    spoil, said = RECEIPTS[name]
    spoil(shipped_adapter)
    with pytest.raises(SourceError, match=said):
        shipped.find_shipped("tiny")


def test_a_ledger_that_is_not_the_receipts_is_refused(shipped_adapter):
    edit_receipt(shipped_adapter, ledger={"size": 3, "head": "5" * 64})
    with pytest.raises(LedgerError, match="not the recorded head"):
        shipped.find_shipped("tiny")


def claim_root(folder, root):
    """A receipt and a ledger that agree on another root, with digests that fit."""
    rewrite(folder, change_data("train_finished", tensor_root=root))
    events = list(read_ledger(folder / LEDGER_NAME))
    digests = {path.name: sha256_file(path) for path in folder.iterdir() if path.name != "receipt.json"}
    state = {"size": len(events), "head": events[-1].digest}
    edit_receipt(folder, tensor_root=root, ledger=state, files=digests)


def test_an_adapter_that_makes_another_model_than_was_shipped_is_never_applied(
    shipped_adapter, signed_run, adapter_recipe, execute, tmp_path, capsys
):
    claim_root(shipped_adapter, "5" * 64)
    assert shipped.find_shipped("tiny").tensor_root == "5" * 64
    assert run_command(["apply", str(signed_run / "base"), "shipped:tiny", "--out", str(tmp_path / "out")]) == 2
    assert "another model of its base than was recorded" in capsys.readouterr().err
    asked = replace(adapter_recipe, base=replace(adapter_recipe.base, adapter="shipped:tiny"))
    with pytest.raises(ModelError, match="another model of its base"):
        execute(asked, tmp_path / "on")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "on" / "start").exists()


def test_no_adapter_of_a_name_lists_those_there_are(shipped_adapter):
    with pytest.raises(ConfigError, match="tiny"):
        shipped.find_shipped("huge")


def test_every_adapter_of_this_package_is_whole():
    for name in shipped.list_shipped():
        assert shipped.find_shipped(name).folder.name == name
