"""A finished run's adapter goes into a package, whole or not at all; anything else is refused."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rewriting import change_data, flip, rewrite, without

from ar2diff.cli.ship import main
from ar2diff.errors import CheckpointError, ConfigError, LedgerError, ModelError, RunError
from ar2diff.hashing import sha256_file
from ar2diff.models.adapter_file import ADAPTER_WEIGHTS_NAME, EXPORTED_NAMES
from ar2diff.models.loading import load_model
from ar2diff.pipelines import ship
from ar2diff.pipelines.recipe import parse_recipe
from ar2diff.pipelines.ship import KEPT_NAMES, ship_adapter
from ar2diff.provenance.ledger import LEDGER_NAME, read_ledger
from ar2diff.provenance.signing import HEADS_NAME, HeadSigner
from ar2diff.sources import shipped
from ar2diff.train.checkpoint import list_checkpoints


def test_what_is_shipped_is_the_adapter_and_what_proves_its_origin(signed_run, shipped_adapter, adapter_recipe):
    assert {path.name for path in shipped_adapter.iterdir()} == {*EXPORTED_NAMES, *KEPT_NAMES, "receipt.json"}
    assert all((shipped_adapter / name).read_bytes() == (signed_run / name).read_bytes() for name in KEPT_NAMES)
    events = list(read_ledger(signed_run / LEDGER_NAME))
    assert json.loads((shipped_adapter / "receipt.json").read_text()) == {
        "name": "tiny",
        "base": adapter_recipe.base.source,
        "base_tensor_root": load_model(signed_run / "base").tensor_root,
        "tensor_root": load_model(list_checkpoints(signed_run)[-1]).tensor_root,
        "step": 3,
        "ledger": {"size": len(events), "head": events[-1].digest},
        "recipe": adapter_recipe.as_json(),
        "files": {name: sha256_file(shipped_adapter / name) for name in (*EXPORTED_NAMES, *KEPT_NAMES)},
    }


def test_the_command_says_what_it_wrote_and_errors_are_one_line(signed_run, into, capsys):
    assert main([str(signed_run), "tiny"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {into / 'tiny'}: 8 files, ")
    assert main([str(signed_run), "tiny"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["", "Tiny", "a b", "../tiny", "a/b", ".tiny", "tiny.", "a--b", "tiny\n", "é"])
def test_a_name_with_odd_characters_is_refused(signed_run, into, name):
    with pytest.raises(ConfigError, match="odd characters"):
        ship_adapter(signed_run, name, into)
    assert not into.exists()


def lose_checkpoint(folder):
    shutil.rmtree(list_checkpoints(folder)[-1])


def add_checkpoint(folder):
    newest = list_checkpoints(folder)[-1]
    shutil.copytree(newest, newest.with_name("step-000009"))


def unsign(folder):
    (folder / HEADS_NAME).unlink()


def sign_a_part(folder):
    lines = (folder / HEADS_NAME).read_bytes().splitlines(keepends=True)
    (folder / HEADS_NAME).write_bytes(b"".join(lines[:-1]))


def spoil_signature(folder):
    lines = (folder / HEADS_NAME).read_text().splitlines()
    first, second = json.loads(lines[0]), json.loads(lines[1])
    first["signatures"][0]["sig"] = second["signatures"][0]["sig"]
    (folder / HEADS_NAME).write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")


def sign_another_ledger(folder):
    """Signatures that hold, by the right key, over a head that this ledger never had."""
    signer = HeadSigner.generate()
    rewrite(folder, lambda event: {**event, "data": signer.public_key} if event["type"] == "signer" else event)
    size = len(list(read_ledger(folder / LEDGER_NAME)))
    (folder / HEADS_NAME).unlink()
    signer.append(folder / HEADS_NAME, run_id="tiny", size=size, head="5" * 64)


def write_audit(folder, **changes):
    events = list(read_ledger(folder / LEDGER_NAME))
    state = {"size": len(events), "head": events[-1].digest}
    (folder / "audit.json").write_text(json.dumps({"verdict": "pass", "ledger": state, **changes}))


REFUSED = {
    "no run": (shutil.rmtree, RunError, "not the folder of a run"),
    "not converted": (lambda folder: rewrite(folder, without("conversion_finished")), RunError, "is not finished"),
    "not trained": (lambda folder: rewrite(folder, without("train_finished")), RunError, "is not finished"),
    "no recipe": (lambda folder: rewrite(folder, without("recipe_started")), RunError, "is not finished"),
    "its checkpoint is gone": (lose_checkpoint, RunError, "is not finished"),
    "a later checkpoint": (add_checkpoint, RunError, "is not finished"),
    "on-policy rounds": (
        lambda folder: rewrite(folder, lambda e: {**e, "type": "on_policy_round"} if e["type"] == "code" else e),
        RunError,
        "on-policy",
    ),
    "not evaluated": (
        lambda folder: rewrite(folder, without("evaluate")),
        RunError,
        "not the one of this checkpoint",
    ),
    "another report": (
        lambda folder: (folder / "eval.json").write_text("{}"),
        RunError,
        "not the one of this checkpoint",
    ),
    "a report of another model": (
        lambda folder: rewrite(folder, change_data("evaluate", roots={"converted": "5" * 64})),
        RunError,
        "not the one of this checkpoint",
    ),
    "no card": (lambda folder: (folder / "MODEL_CARD.md").unlink(), RunError, "MODEL_CARD.md of the run is missing"),
    "a changed ledger": (lambda folder: flip(folder / LEDGER_NAME), LedgerError, "ledger line"),
    "no signatures": (unsign, LedgerError, "is not signed"),
    "an unsigned end": (sign_a_part, LedgerError, "is not signed"),
    "a false signature": (spoil_signature, LedgerError, "signature does not hold"),
    "signatures of another ledger": (sign_another_ledger, LedgerError, "not the recorded head"),
    "another root": (
        lambda folder: rewrite(folder, change_data("train_finished", tensor_root="5" * 64)),
        RunError,
        "not the one that the ledger names",
    ),
    "changed weights": (
        lambda folder: flip(list_checkpoints(folder)[-1] / ADAPTER_WEIGHTS_NAME),
        CheckpointError,
        "missing or was changed",
    ),
    "another base": (lambda folder: flip(folder / "base" / "model.safetensors"), ModelError, "another base"),
    "an audit of another state": (
        lambda folder: write_audit(folder, ledger={"size": 3, "head": "5" * 64}),
        RunError,
        "another state",
    ),
    "a failed audit": (lambda folder: write_audit(folder, verdict="fail"), RunError, "failed its audit"),
    "an audit that is none": (lambda folder: (folder / "audit.json").write_text("[]"), RunError, "another state"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_is_not_finished_and_whole_is_refused_and_nothing_is_left(run_copy, into, name):
    spoil, error, said = REFUSED[name]
    spoil(run_copy)
    with pytest.raises(error, match=said):
        ship_adapter(run_copy, "tiny", into)
    assert not into.exists()


def test_a_run_that_is_written_anew_in_full_is_the_measure_of_the_refusals(run_copy, into):
    # Else the refusals above could be of the rewriting itself.
    rewrite(run_copy, lambda event: event)
    write_audit(run_copy)
    folder = ship_adapter(run_copy, "tiny", into)
    assert (folder / "audit.json").read_bytes() == (run_copy / "audit.json").read_bytes()


def test_a_checkpoint_without_adapter_is_refused(tiny_hub, execute, into, tmp_path):
    plain = parse_recipe(tomllib.loads(tiny_hub.recipe_text()))
    execute(plain, tmp_path / "run", signer=HeadSigner.generate())
    with pytest.raises(ConfigError, match="no adapter of its own"):
        ship_adapter(tmp_path / "run", "tiny", into)
    assert not into.exists()


def test_more_than_the_package_takes_is_refused(signed_run, shipped_adapter, into, monkeypatch):
    size = sum(path.stat().st_size for path in shipped_adapter.iterdir())
    shutil.rmtree(shipped_adapter)
    monkeypatch.setattr(ship, "MAX_BYTES", size - 1)
    with pytest.raises(ConfigError, match="too large"):
        ship_adapter(signed_run, "tiny", into)
    assert list(into.iterdir()) == []
    monkeypatch.setattr(ship, "MAX_BYTES", size)
    assert ship_adapter(signed_run, "tiny", into) == shipped_adapter


def test_a_name_that_is_taken_is_refused_and_what_is_there_stays(signed_run, shipped_adapter, into):
    before = {path: path.read_bytes() for path in shipped_adapter.iterdir()}
    with pytest.raises(ConfigError, match="there already"):
        ship_adapter(signed_run, "tiny", into)
    assert {path: path.read_bytes() for path in shipped_adapter.iterdir()} == before


@pytest.mark.parametrize("count", range(8))
def test_a_stop_between_files_leaves_nothing(signed_run, into, monkeypatch, count):
    written = []

    def write(path, content):
        if len(written) == count:
            raise KeyboardInterrupt
        written.append(path)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    monkeypatch.setattr(ship, "write_bytes", write)
    monkeypatch.setattr(ship, "write_json", write)
    with pytest.raises(KeyboardInterrupt):
        ship_adapter(signed_run, "tiny", into)
    assert list(into.iterdir()) == []


def test_a_kill_leaves_nothing_that_is_read_and_the_next_one_removes_it(signed_run, into):
    program = (
        "import os, sys; from pathlib import Path; from ar2diff.pipelines import ship\n"
        "ship.verify_shipped = lambda folder: os._exit(9)\n"
        "ship.ship_adapter(Path(sys.argv[1]), 'tiny', Path(sys.argv[2]))"
    )
    path = os.pathsep.join([str(Path(ship.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, str(signed_run), str(into)]
    assert subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": path}).returncode == 9
    assert [".partial-" in path.name for path in into.iterdir()] == [True]
    assert shipped.list_shipped() == []
    folder = ship_adapter(signed_run, "tiny", into)
    assert list(into.iterdir()) == [folder]
