"""The run's own key holder tells a better story than the files do: each is signed, and none of them passes."""

import json

from forgeries import code, data_of, edit_source, report
from tampering import cover_up, edit_json, flip, forge, of_type, put

from ar2diff.audit.tensor_files import list_model_tensors, stored_root
from ar2diff.hashing import sha256_file, sha256_json


def told(edit):
    """An edit of the ledger, signed and documented anew."""
    return lambda run, signer: forge(run, signer, edit)


def unlist(name):
    """The list of the code that trained lacks a file, and its digest fits."""

    def edit(data):
        data["files"].pop(name)
        data["root"] = sha256_json(data["files"])

    return code(edit)


def edit_recipe(section, **changes):
    """The recipe says something else, and its digest fits."""

    def edit(events):
        for event in of_type(events, "recipe_started"):
            event["data"]["recipe"][section].update(changes)
            event["data"]["sha256"] = sha256_json(event["data"]["recipe"])

    return edit


def refit(folder):
    """A checkpoint's state and mark fit its changed files; the digest of the state, for the ledger."""
    names = json.loads((folder / "training.json").read_text())["files"]
    digests = {name: sha256_file(folder / name) for name in names}
    edit_json(folder / "training.json", lambda content: content["files"].update(digests))
    put(folder / "COMPLETE", sha256_file(folder / "training.json") + "\n")
    return sha256_file(folder / "training.json")


def average_of_nothing(run, signer):
    """The averaged model is another one, which the ledger names."""
    path = run / "averaged/model.safetensors"
    flip(path)
    root = stored_root(list_model_tensors(run / "averaged"))
    digest = sha256_file(path)

    def edit(events):
        data = of_type(events, "checkpoints_averaged")[-1]["data"]
        data.update(tensor_root=root)
        data["files"]["model.safetensors"] = digest

    forge(run, signer, edit)


def score(**changes):
    """Figures of the first mode."""
    return report(lambda content: content["scores"][0].update(changes))


FORGERIES = {
    "another name for the base": ("A3", told(data_of("train_started", base="hub:maker/grand@" + "1" * 40))),
    "a plain name for the base": ("A3", told(data_of("train_started", base="Grand-70B"))),
    "a recipe of other settings": ("A3", told(edit_recipe("train", seed=9))),
    "a recipe of another base": ("A3", told(edit_recipe("base", source="hub:maker/grand@" + "1" * 40))),
    "a recipe of other data": ("A5", told(edit_recipe("data", max_document_len=9))),
    "another block size in the card": ("A12", told(data_of("train_started", block_size=64))),
    "another shift in the card": ("A12", told(data_of("train_started", shift_logits=False))),
    "another mask in the card": ("A12", told(data_of("train_started", mask_token="<|good|>"))),
    "another objective in architecture.json": ("A12", told(data_of("train_started", objective={"ar_weight": 0}))),
    "another checkpoint at the end": ("A11", told(data_of("train_finished", checkpoint="step-000099"))),
    "another time of training": ("A9", told(data_of("train_finished", elapsed_s=1e6))),
    "another averaged model": ("A11", average_of_nothing),
    "no card where the run made one": ("A11", lambda run, _: (run / "MODEL_CARD.md").unlink()),
    "bytes that only look like the rendered ones": (
        "A11",
        lambda run, signer: (
            forge(run, signer, data_of("recipe_started", note="a\\xff")),
            forge(run, signer, data_of("train_started", fused_loss_refused="a\\xff")),
            put(
                run / "architecture.json",
                (run / "architecture.json").read_bytes().replace(b"a\\\\xff", b"a\\\xff"),
            ),
        ),
    ),
    "a source under another name": (
        "A5",
        lambda run, s: cover_up(run, s, edit_source(0, source="procedural:structured")),
    ),
    "a source by another recipe": ("A5", lambda run, s: cover_up(run, s, edit_source(0, recipe="gsm8k"))),
    "the trainer left out of the code": ("A16", told(unlist("train/trainer.py"))),
    "the loss left out of the code": ("A16", told(unlist("diffusion/loss.py"))),
    "a narrower interval": ("A17", score(interval=[0.99, 1.0])),
    "more answers equal to the AR mode's": ("A17", score(equal_share=1.0)),
    "more tokens a second": ("A17", score(tokens_per_s=1e4)),
    "more tokens a pass": ("A17", score(tokens_per_forward=8.0)),
    "a greater speed-up": ("A17", report(lambda c: c["speedup_over_ar"].update(diffusion=9.0))),
    "a better difference to the AR mode": (
        "A17",
        report(lambda c: c["against_ar"][0].update(difference=0.9, only_mode=2)),
    ),
    "a surer difference to the AR mode": ("A17", report(lambda c: c["against_ar"][0].update(interval=[0.1, 0.2]))),
    "an engine that was not asked": ("A17", told(data_of("evaluate", engine={"precision": "fp64"}))),
    "fewer bits a token": ("A17", report(lambda c: c["bits_per_token"].update(ar=0.1))),
    "answers that the model does not give": ("A17", None),
}
