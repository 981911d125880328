"""A finished run's adapter goes into a package, is found there, applied and trained on; anything else is refused."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from test_run_recipe import Watcher

from ar2diff.cli import run as run_command
from ar2diff.cli.ship import main
from ar2diff.clock import SystemClock
from ar2diff.errors import Ar2diffError, CheckpointError, ConfigError, LedgerError, ModelError, RunError, SourceError
from ar2diff.hashing import canonical_json, sha256_bytes, sha256_file
from ar2diff.models.adapter_file import ADAPTER_WEIGHTS_NAME, EXPORTED_NAMES
from ar2diff.models.adapters import AdapterConfig
from ar2diff.models.loading import load_model
from ar2diff.pipelines import ship
from ar2diff.pipelines.recipe import parse_recipe
from ar2diff.pipelines.run import run_recipe
from ar2diff.pipelines.ship import ship_adapter
from ar2diff.pipelines.stages import RunContext
from ar2diff.provenance.ledger import LEDGER_NAME, Ledger, find_events, read_ledger
from ar2diff.provenance.signing import HEADS_NAME, HeadSigner
from ar2diff.sources import shipped
from ar2diff.train.checkpoint import list_checkpoints
from ar2diff.train.objective import ObjectiveConfig

FROZEN = ObjectiveConfig(block_sizes=(4,), ar_weight=0.0, anchor="last")
KEPT = {LEDGER_NAME, HEADS_NAME, "MODEL_CARD.md", "eval.json"}


@pytest.fixture(scope="module")
def execute(tiny_hub, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")

    def run(recipe, run_dir, *, signer=None, **options):
        with Ledger.open(run_dir, clock=SystemClock(), run_id="tiny", signer=signer) as ledger:
            context = RunContext(
                run_dir=run_dir,
                cache_dir=cache,
                library_dir=cache / "native",
                ledger=ledger,
                clock=SystemClock(),
                view=Watcher(),
                endpoint=tiny_hub.endpoint,
            )
            return run_recipe(recipe, context, **options)

    return run


@pytest.fixture(scope="module")
def recipe(tiny_hub):
    plain = parse_recipe(tomllib.loads(tiny_hub.recipe_text()))
    return replace(plain, train=replace(plain.train, adapter=AdapterConfig(rank=2, alpha=4.0), objective=FROZEN))


@pytest.fixture(scope="module")
def finished(recipe, execute, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    execute(recipe, folder, signer=HeadSigner.generate())
    return folder


@pytest.fixture
def run_dir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def into(tmp_path, monkeypatch):
    """An empty place for shipped adapters, which the package then takes for its own."""
    monkeypatch.setattr(shipped, "SHIPPED_DIR", tmp_path / "shipped")
    return tmp_path / "shipped"


@pytest.fixture
def adapter(finished, into):
    """The folder of a shipped adapter, to be spoilt."""
    return ship_adapter(finished, "tiny", into)


def rewrite(run_dir, change):
    """The run's ledger with `change` done to every event, chained and signed anew by another key."""
    signer, head, events = HeadSigner.generate(), "0" * 64, []
    for line in (run_dir / LEDGER_NAME).read_bytes().splitlines():
        event = json.loads(line)
        if event["type"] == "signer":
            event["data"] = signer.public_key
        if (kept := change(event)) is not None:
            events.append(kept)
    with (run_dir / LEDGER_NAME).open("wb") as stream:
        for seq, event in enumerate(events):
            written = canonical_json({**event, "prev": head, "seq": seq})
            stream.write(written + b"\n")
            head = sha256_bytes(written)
    (run_dir / HEADS_NAME).unlink()
    signer.append(run_dir / HEADS_NAME, run_id="tiny", size=len(events), head=head)


def change_data(kind, **data):
    def change(event):
        return {**event, "data": {**event["data"], **data}} if event["type"] == kind else event

    return change


def without(kind):
    return lambda event: None if event["type"] == kind else event


def edit_receipt(folder, **changes):
    path = folder / "receipt.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def base_of(run_dir):
    return run_dir / "base"


def test_what_is_shipped_is_the_adapter_and_what_proves_where_it_came_from(finished, adapter, recipe):
    assert {path.name for path in adapter.iterdir()} == {*EXPORTED_NAMES, *KEPT, "receipt.json"}
    assert all((adapter / name).read_bytes() == (finished / name).read_bytes() for name in KEPT)
    events = list(read_ledger(finished / LEDGER_NAME))
    assert json.loads((adapter / "receipt.json").read_text()) == {
        "name": "tiny",
        "base": recipe.base.source,
        "base_tensor_root": load_model(base_of(finished)).tensor_root,
        "tensor_root": load_model(list_checkpoints(finished)[-1]).tensor_root,
        "step": 3,
        "ledger": {"size": len(events), "head": events[-1].digest},
        "recipe": recipe.as_json(),
        "files": {name: sha256_file(adapter / name) for name in (*EXPORTED_NAMES, *sorted(KEPT))},
    }


def test_a_shipped_adapter_is_found_applied_and_trained_on(finished, adapter, recipe, execute, tmp_path, capsys):
    root = load_model(list_checkpoints(finished)[-1]).tensor_root
    assert shipped.list_shipped() == ["tiny"]
    assert shipped.find_shipped("tiny") == (adapter, root)
    assert run_command(["apply", str(base_of(finished)), "shipped:tiny", "--out", str(tmp_path / "out")]) == 0
    assert root in capsys.readouterr().out
    assert load_model(tmp_path / "out").tensor_root == root
    asked = replace(recipe, base=replace(recipe.base, adapter="shipped:tiny"))
    execute(replace(asked, evaluate=replace(asked.evaluate, problems=())), tmp_path / "on")
    (applied,) = find_events(tmp_path / "on" / LEDGER_NAME, "adapter_applied")
    assert (applied.data["source"], applied.data["tensor_root"]) == ("shipped:tiny", root)
    (started,) = find_events(tmp_path / "on" / LEDGER_NAME, "train_started")
    assert started.data["base_tensor_root"] == root


def test_an_adapter_that_was_trained_on_ships_for_the_base_itself(adapter, recipe, execute, into, tmp_path):
    asked = replace(recipe, base=replace(recipe.base, adapter="shipped:tiny"))
    execute(asked, tmp_path / "on", signer=HeadSigner.generate())
    again = ship_adapter(tmp_path / "on", "tiny-on", into)
    receipts = [json.loads((folder / "receipt.json").read_text()) for folder in (adapter, again)]
    assert receipts[0]["base_tensor_root"] == receipts[1]["base_tensor_root"]
    assert receipts[0]["tensor_root"] != receipts[1]["tensor_root"]
    assert shipped.list_shipped() == ["tiny", "tiny-on"]


def test_the_command_says_what_it_wrote_and_errors_are_one_line(finished, into, capsys):
    assert main([str(finished), "tiny"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {into / 'tiny'}: 8 files, ")
    assert main([str(finished), "tiny"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["", "Tiny", "a b", "../tiny", "a/b", ".tiny", "tiny.", "a--b", "tiny\n", "é"])
def test_a_name_with_odd_characters_is_refused(finished, into, name):
    with pytest.raises(ConfigError, match="odd characters"):
        ship_adapter(finished, name, into)
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
def test_a_run_that_is_not_finished_and_whole_is_refused_and_nothing_is_left(run_dir, into, name):
    spoil, error, said = REFUSED[name]
    spoil(run_dir)
    with pytest.raises(error, match=said):
        ship_adapter(run_dir, "tiny", into)
    assert not into.exists()


def test_a_run_that_is_written_anew_in_full_is_the_measure_of_the_refusals(run_dir, into):
    # Else the refusals above could be of the rewriting itself.
    rewrite(run_dir, lambda event: event)
    write_audit(run_dir)
    folder = ship_adapter(run_dir, "tiny", into)
    assert (folder / "audit.json").read_bytes() == (run_dir / "audit.json").read_bytes()


def test_a_checkpoint_without_adapter_is_refused(tiny_hub, execute, into, tmp_path):
    plain = parse_recipe(tomllib.loads(tiny_hub.recipe_text()))
    execute(plain, tmp_path / "run", signer=HeadSigner.generate())
    with pytest.raises(ConfigError, match="no adapter of its own"):
        ship_adapter(tmp_path / "run", "tiny", into)
    assert not into.exists()


def test_more_than_the_package_takes_is_refused(finished, adapter, into, monkeypatch):
    size = sum(path.stat().st_size for path in adapter.iterdir())
    shutil.rmtree(adapter)
    monkeypatch.setattr(ship, "MAX_BYTES", size - 1)
    with pytest.raises(ConfigError, match="too large"):
        ship_adapter(finished, "tiny", into)
    assert list(into.iterdir()) == []
    monkeypatch.setattr(ship, "MAX_BYTES", size)
    assert ship_adapter(finished, "tiny", into) == adapter


def test_a_name_that_is_taken_is_refused_and_what_is_there_stays(finished, adapter, into):
    before = {path: path.read_bytes() for path in adapter.iterdir()}
    with pytest.raises(ConfigError, match="there already"):
        ship_adapter(finished, "tiny", into)
    assert {path: path.read_bytes() for path in adapter.iterdir()} == before


@pytest.mark.parametrize("count", range(8))
def test_a_stop_between_files_leaves_nothing(finished, into, monkeypatch, count):
    written = []

    def write(path, content):
        if len(written) == count:
            raise KeyboardInterrupt
        written.append(path)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    monkeypatch.setattr(ship, "write_bytes", write)
    monkeypatch.setattr(ship, "write_json", write)
    with pytest.raises(KeyboardInterrupt):
        ship_adapter(finished, "tiny", into)
    assert list(into.iterdir()) == []


def test_a_kill_leaves_nothing_that_is_read_and_the_next_one_removes_it(finished, into):
    program = (
        "import os, sys; from pathlib import Path; from ar2diff.pipelines import ship\n"
        "ship.verify_shipped = lambda folder: os._exit(9)\n"
        "ship.ship_adapter(Path(sys.argv[1]), 'tiny', Path(sys.argv[2]))"
    )
    path = os.pathsep.join([str(Path(ship.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, str(finished), str(into)]
    assert subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": path}).returncode == 9
    assert [".partial-" in path.name for path in into.iterdir()] == [True]
    assert shipped.list_shipped() == []
    folder = ship_adapter(finished, "tiny", into)
    assert list(into.iterdir()) == [folder]


@pytest.mark.parametrize("name", [*EXPORTED_NAMES, *sorted(KEPT)])
@pytest.mark.parametrize("spoil", [flip, Path.unlink], ids=["changed", "missing"])
def test_a_shipped_file_that_was_changed_is_never_applied(adapter, finished, tmp_path, name, spoil):
    spoil(adapter / name)
    with pytest.raises(SourceError, match=f"{name} of a shipped adapter is missing or was changed"):
        shipped.find_shipped("tiny")
    assert run_command(["apply", str(base_of(finished)), "shipped:tiny", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_file_that_the_receipt_does_not_know_is_refused(adapter):
    (adapter / "extra.txt").write_text("x")
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
def test_a_receipt_that_says_something_else_is_refused(adapter, name):
    spoil, said = RECEIPTS[name]
    spoil(adapter)
    with pytest.raises(SourceError, match=said):
        shipped.find_shipped("tiny")


def test_a_ledger_that_is_not_the_receipts_is_refused(adapter):
    edit_receipt(adapter, ledger={"size": 3, "head": "5" * 64})
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
    adapter, finished, recipe, execute, tmp_path, capsys
):
    claim_root(adapter, "5" * 64)
    assert shipped.find_shipped("tiny").tensor_root == "5" * 64
    assert run_command(["apply", str(base_of(finished)), "shipped:tiny", "--out", str(tmp_path / "out")]) == 2
    assert "another model of its base than was recorded" in capsys.readouterr().err
    asked = replace(recipe, base=replace(recipe.base, adapter="shipped:tiny"))
    with pytest.raises(ModelError, match="another model of its base"):
        execute(asked, tmp_path / "on")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "on" / "start").exists()


def test_no_adapter_of_a_name_lists_those_there_are(adapter):
    with pytest.raises(ConfigError, match="tiny"):
        shipped.find_shipped("huge")


def test_every_adapter_of_this_package_is_whole():
    for name in shipped.list_shipped():
        assert shipped.find_shipped(name).folder.name == name
    assert all(issubclass(error, Ar2diffError) for _, error, _ in REFUSED.values())
