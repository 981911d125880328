"""A run that began at a stored adapter passes the whole audit; whoever tells another beginning of it does not."""

import json
import shutil

import numpy as np
import pytest
from clean_runs import ON_ADAPTER, VARIANTS
from made_run import copy_run, train_on_adapter
from safetensors.numpy import load_file, save_file
from tampering import edit_json, forge, of_type, put, read_events

from ar2diff.audit.report import render_text
from ar2diff.audit.result import ClaimResult
from ar2diff.audit.table import CLAIMS, REPLAY_ID
from ar2diff.audit.tensor_files import both_roots, list_model_tensors, list_tensors, read_row, stored_root
from ar2diff.audit.verify import audit_run
from ar2diff.hashing import sha256_file, sha256_json
from ar2diff.provenance.documents import RENDERERS
from ar2diff.provenance.ledger import LEDGER_NAME, read_ledger
from ar2diff.provenance.statements import list_stage_statements
from ar2diff.sources import shipped

MODEL, ADAPTER, DIFFUSION = "model.safetensors", "adapter_model.safetensors", "block_diffusion.json"
ADAPTER_CONFIG = "adapter_config.json"
MASK_ROW = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
EMBEDDING = "model.embed_tokens.weight"
MASK_ID = 258


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory):
    return train_on_adapter(tmp_path_factory.mktemp("on_adapter"), change=ON_ADAPTER)


@pytest.fixture
def run(adapter_run, tmp_path):
    return copy_run(adapter_run.folder, tmp_path / "run")


def applied_of(events):
    (event,) = of_type(events, "adapter_applied")
    return event["data"]


def digests_of(start):
    return {name: sha256_file(start / name) for name in (ADAPTER, ADAPTER_CONFIG, DIFFUSION)}


def replace_all(events, words):
    """The ledger with some words in place of others, wherever they stand."""
    text = json.dumps(events)
    for old, new in words.items():
        text = text.replace(old, new)
    events[:] = json.loads(text)


def name_start(run, root):
    """run.json and the checkpoints' states name this root; the digests of the states, old to new."""
    edit_json(run / "run.json", lambda content: content.update(base_tensor_root=root))
    words = {}
    for path in sorted((run / "checkpoints").glob("*/training.json")):
        old = sha256_file(path)
        edit_json(path, lambda content: content.update(base_tensor_root=root))
        words[old] = sha256_file(path)
        put(path.parent / "COMPLETE", words[old] + "\n")
    return words


def refit(run, signer):
    """Every record of the run fits RUN/start as it is now, and is signed."""
    start = run / "start"
    applied = applied_of(read_events(run))
    edit_json(
        start / ADAPTER_CONFIG,
        lambda content: content["ar2diff"].update(
            base_tensor_root=stored_root(list_tensors(start)),
            adapter_tensor_root=stored_root([t for t in list_model_tensors(start) if t.path.name == ADAPTER]),
        ),
    )
    root = stored_root(list_model_tensors(start))
    live = both_roots(list_tensors(start), tied_head=True).live
    words = {applied["tensor_root"]: root, **name_start(run, root)}

    def edit(events):
        replace_all(events, words)
        applied_of(events)["files"] = digests_of(start)
        for event in of_type(events, "train_started"):
            event["data"]["live_tensor_root"] = live

    forge(run, signer, edit)


def edit_tensors(path, edit):
    tensors = load_file(path)
    edit(tensors)
    path.unlink()
    save_file(tensors, path)


def spoil(name, edit, *, fit=True):
    """Other tensors in a file of RUN/start, which all else fits."""

    def act(run, signer):
        edit_tensors(run / "start" / name, edit)
        if fit:
            refit(run, signer)

    return act


def rewrite(name, edit):
    """Another JSON file in RUN/start, which all else fits."""

    def act(run, signer):
        edit_json(run / "start" / name, edit)
        refit(run, signer)

    return act


def told(edit):
    return lambda run, signer: forge(run, signer, edit)


def tell(**changes):
    """Another story of what was applied."""
    return told(lambda events: applied_of(events).update(changes))


def change_adapter(tensors):
    for name in tensors:
        if ".lora_" in name:
            tensors[name] = tensors[name] + np.float32(0.5)


def change_layer(tensors):
    name = next(name for name in sorted(tensors) if "q_proj" in name)
    tensors[name] = tensors[name] + np.float32(0.5)


def change_row(tensors):
    tensors[EMBEDDING][MASK_ID] += np.float32(0.5)


def name_adapter(name, *, first_only=False):
    """The recipes name another adapter, or none, and their digests fit."""

    def edit(events):
        recipes = of_type(events, "recipe_started")
        if first_only:
            again = json.loads(json.dumps(recipes[0]))
            events.insert(events.index(recipes[0]), again)
            recipes = [again]
        for event in recipes:
            event["data"]["recipe"]["base"].pop("adapter")
            if name is not None:
                event["data"]["recipe"]["base"]["adapter"] = name
            event["data"]["sha256"] = sha256_json(event["data"]["recipe"])

    return told(edit)


def rename(events, name):
    """Recipes and event call the adapter otherwise."""
    source = applied_of(events)["source"]
    replace_all(events, {json.dumps(source): json.dumps(name)})
    for event in of_type(events, "recipe_started"):
        event["data"]["sha256"] = sha256_json(event["data"]["recipe"])


def drop_event(events):
    events.remove(of_type(events, "adapter_applied")[0])


def move_event(before):
    """The event stands before the first of a type, or at the end."""

    def edit(events):
        event = of_type(events, "adapter_applied")[0]
        events.remove(event)
        events.insert(len(events) if before is None else events.index(of_type(events, before)[0]), event)

    return told(edit)


def begin_at_base(run, signer):
    """The records say that training began at the base itself; what was applied stays."""
    applied = applied_of(read_events(run))
    words = name_start(run, applied["base_tensor_root"])

    def edit(events):
        replace_all(events, words)
        for event in of_type(events, "train_started"):
            event["data"].update(base_tensor_root=applied["base_tensor_root"])

    forge(run, signer, edit)


def name_in_first_state(run, signer):
    path = sorted((run / "checkpoints").glob("*/training.json"))[0]
    edit_json(path, lambda content: content.update(base_tensor_root="1" * 64))


def other_token(content):
    content["added_tokens"][0]["content"] = "<|other|>"


ROOT_STORED, ROOT = "tensor root of the start as stored", "tensor root of the start"
OTHER_RECIPE, SECTION = "recipes that name another adapter than the one that was put on the base", "section base"
FORGERIES = {
    "an adapter changed after the fact": ("A3", "files of the adapter", spoil(ADAPTER, change_adapter, fit=False)),
    "an adapter changed, and its event fits": (
        "A3",
        ROOT_STORED,
        lambda run, signer: (
            spoil(ADAPTER, change_adapter, fit=False)(run, signer),
            tell(files=digests_of(run / "start"), tensor_root=stored_root(list_model_tensors(run / "start")))(
                run, signer
            ),
        ),
    ),
    "another root of what came out": ("A3", "tensor root of the base with its adapter", tell(tensor_root="1" * 64)),
    "another base under the adapter": (
        "A3",
        "tensors under the adapter that are not the base's",
        spoil(MODEL, change_layer),
    ),
    "another base in the event": ("A3", "tensor root of the base under the adapter", tell(base_tensor_root="1" * 64)),
    "a mask row that is not the adapter's": ("A3", "row of the mask", spoil(MODEL, change_row)),
    "no event": ("A3", OTHER_RECIPE, told(drop_event)),
    "no event, in the recipe's section": ("A3", SECTION, told(drop_event)),
    "an event of another adapter": ("A3", OTHER_RECIPE, tell(source="local:/home/me/grand")),
    "an event of another adapter, in the recipe's section": ("A3", SECTION, tell(source="local:/home/me/grand")),
    "a name that no recipe can say": (
        "A3",
        "an adapter is shipped:NAME or local:PATH",
        told(lambda events: rename(events, "hub:maker/grand")),
    ),
    "a recipe without the adapter": ("A3", SECTION, name_adapter(None)),
    "a first recipe of another adapter": ("A3", OTHER_RECIPE, name_adapter("local:/else", first_only=True)),
    "two events": (
        "A3",
        "adapters that were put on the base",
        told(
            lambda events: events.insert(
                events.index(of_type(events, "prepare")[0]), of_type(events, "adapter_applied")[0]
            )
        ),
    ),
    "another folder": ("A3", "folder of the start", tell(folder="base")),
    "put on a base that was not there yet": (
        "A3",
        "the base was fetched before the adapter was put on it",
        move_event("fetch"),
    ),
    "put on the base after training": (
        "A3",
        "the adapter was put on the base before that was used",
        move_event(None),
    ),
    "trained from the base itself": ("A3", ROOT_STORED, begin_at_base),
    "another start in run.json": (
        "A3",
        ROOT,
        lambda run, _: edit_json(run / "run.json", lambda content: content.update(base_tensor_root="1" * 64)),
    ),
    "another start in the first checkpoint": ("A3", ROOT, name_in_first_state),
    "other live weights": (
        "A3",
        "tensor root of the live weights (fp32)",
        told(lambda events: of_type(events, "train_started")[-1]["data"].update(live_tensor_root="1" * 64)),
    ),
    "compared with the start": (
        "A3",
        "tensor root of the base",
        told(
            lambda events: of_type(events, "evaluate")[-1]["data"]["roots"].update(
                parent=applied_of(events)["tensor_root"]
            )
        ),
    ),
    "another scale": ("A3", "settings of the adapter", rewrite(ADAPTER_CONFIG, lambda c: c.update(lora_alpha=400.0))),
    "another anchor": ("A3", "how the start decodes", rewrite(DIFFUSION, lambda c: c.update(anchor="predicted"))),
    "another mask": ("A3", "mask token of the start", rewrite(DIFFUSION, lambda c: c.update(mask_token_id=257))),
    "another rotation": (
        "A3",
        "settings that are not the base's",
        rewrite("config.json", lambda c: c.update(rope_theta=5e5)),
    ),
    "more rows": ("A3", "rows of the vocabulary", rewrite("config.json", lambda c: c.update(vocab_size=300))),
    "another tokenizer": ("A3", "tokenizer of the start", rewrite("tokenizer.json", other_token)),
    "a tensor more": (
        "A3",
        "tensors that no place is for",
        spoil(MODEL, lambda tensors: tensors.update(more=np.zeros(2, np.float32))),
    ),
    "a file more": ("A3", "files that are none of the model's", lambda run, _: put(run / "start/notes.txt", "x")),
    "another root of the adapter alone": (
        "A3",
        "tensor root of the adapter",
        lambda run, _: edit_json(
            run / "start" / ADAPTER_CONFIG, lambda c: c["ar2diff"].update(adapter_tensor_root="1" * 64)
        ),
    ),
    "an input of an unknown format": (
        "A4",
        "an allowed format, by name and content",
        lambda run, _: put(run / "start/weights.bin", b"\x00weights"),
    ),
    "answers of the start": (
        "A5",
        "the model that answered is the base",
        told(
            lambda events: of_type(events, "parent_answers")[-1]["data"]["request"]["model"].update(
                tensor_root=applied_of(events)["tensor_root"]
            )
        ),
    ),
    "documents of another adapter": (
        "A11",
        "MODEL_CARD.md rendered again",
        lambda run, _: put(
            run / "MODEL_CARD.md", (run / "MODEL_CARD.md").read_text().replace("with the adapter | local:", "| hub:")
        ),
    ),
}


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
        put(tmp_path / "shipped" / name / "receipt.json", json.dumps({"files": files}))

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
