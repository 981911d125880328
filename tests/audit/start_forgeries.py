"""Other stories of where a run began that had put a stored adapter on its base, each told with the run's own key.

A forgery is the claim that must fail, the check of it, and a function of the copied run and the key.
"""

import json

import numpy as np
from safetensors.numpy import load_file, save_file
from tampering import edit_json, forge, of_type, put, read_events

from ar2diff.audit.tensor_files import both_roots, list_model_tensors, list_tensors, stored_root
from ar2diff.hashing import sha256_file, sha256_json

MODEL, ADAPTER, DIFFUSION = "model.safetensors", "adapter_model.safetensors", "block_diffusion.json"
ADAPTER_CONFIG = "adapter_config.json"
MASK_ROW = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
EMBEDDING = "model.embed_tokens.weight"
MASK_ID = 258


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
