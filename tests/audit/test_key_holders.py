"""The run's own key holder tells a better story than the files do: each is signed, and none of them passes."""

import json

import numpy as np
import pytest
from clean_runs import FROZEN, both, evaluate, train
from forgeries import code, data_of, edit_source, report
from made_run import copy_run, make_run
from safetensors.numpy import load_file, save_file
from tampering import checkpoint, cover_up, edit_json, flip, forge, of_type, put
from test_forgers import rewrite_ledger

from ar2diff.audit.report import render_text
from ar2diff.audit.tensor_files import list_model_tensors, list_tensors, stored_root
from ar2diff.audit.verify import audit_run
from ar2diff.hashing import sha256_file, sha256_json
from ar2diff.models.adapters import AdapterConfig


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


def edit_objective(**changes):
    """What the training is said to have been told of its objective."""

    def edit(events):
        for event in of_type(events, "train_started"):
            event["data"]["config"]["objective"].update(changes)

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


# What is not there contradicts nothing, and proves nothing either.
MISSING = {"no card where the run made one"}
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
    "more answers equal to the AR mode's": ("A17", score(equal_share=0.625)),
    "more tokens a second": ("A17", score(tokens_per_s=1e4)),
    "more tokens a pass": ("A17", score(tokens_per_forward=8.0)),
    "a greater speed-up": ("A17", report(lambda c: c["speedup_over_ar"].update(diffusion=9.0))),
    "a better difference to the AR mode": (
        "A17",
        report(lambda c: c["against_ar"][0].update(difference=0.9, only_mode=2)),
    ),
    "a surer difference to the AR mode": ("A17", report(lambda c: c["against_ar"][0].update(interval=[0.1, 0.2]))),
    "an engine that was not asked": ("A17", told(data_of("evaluate", engine={"precision": "fp64"}))),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_signed_story_that_the_files_do_not_tell_fails(name, copied, made_run):
    claim, act = FORGERIES[name]
    act(copied, made_run.signer)
    found = audit_run(copied, only=(claim,)).find(claim)
    assert found.verdict in ("fail", "evidence missing"), found.as_json()
    if name not in MISSING:
        assert found.verdict == "fail", found.as_json()


@pytest.mark.parametrize(
    ("setting", "forged"), [("anchor", "last"), ("shift_logits", False), ("clean_attention", "block")]
)
def test_a_checkpoint_decodes_as_the_signed_objective_says(copied, made_run, setting, forged):
    # Other comparisons of A12 fail as well: it is this one that has to.
    told(edit_objective(**{setting: forged}))(copied, made_run.signer)
    (check,) = [check for check in audit_run(copied, only=("A12",)).find("A12").checks if check.what == setting]
    assert check.verdict == "fail", check


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory):
    """A run that trained a mask-gated adapter."""
    change = both(FROZEN, train(adapter=AdapterConfig(rank=2, alpha=4.0), average_last=0, steps=2, save_every=None))
    return make_run(tmp_path_factory.mktemp("adapter"), interrupt=False, change=both(change, evaluate(problems=())))


def change_adapter(folder, name):
    """Other values in the tensors of one file of a checkpoint."""
    tensors = load_file(folder / name)
    key = next(key for key in sorted(tensors) if "norm" not in key and "token_adapter" not in key)
    tensors[key] = tensors[key] + np.float32(0.5)
    (folder / name).unlink()
    save_file(tensors, folder / name)


def log_root(run):
    """An edit of the ledger: the newest checkpoint was saved, and training ended, with what its files are now."""
    folder = checkpoint(run)
    digest, root = refit(folder), stored_root(list_model_tensors(folder))

    def edit(events):
        of_type(events, "checkpoint_saved")[-1]["data"].update(tensor_root=root, state_sha256=digest)
        for kind in ("train_finished", "conversion_finished"):
            of_type(events, kind)[-1]["data"].update(tensor_root=root)

    return edit


@pytest.fixture
def adapted(adapter_run, tmp_path):
    return copy_run(adapter_run.folder, tmp_path / "adapted")


ADAPTER_CLAIMS = ("A3", "A11", "A12", "A18")


def test_an_honest_adapter_run_passes(adapted):
    report = audit_run(adapted, only=ADAPTER_CLAIMS)
    assert report.verdict == "pass", render_text(report)


def test_changed_adapter_tensors_fail(adapted):
    change_adapter(checkpoint(adapted), "adapter_model.safetensors")
    assert audit_run(adapted, only=("A11",)).verdict == "fail"


def test_changed_adapter_tensors_with_a_ledger_written_anew_without_the_key_fail(adapted):
    folder = checkpoint(adapted)
    change_adapter(folder, "adapter_model.safetensors")
    tensors = [tensor for tensor in list_model_tensors(folder) if tensor.path.name == "adapter_model.safetensors"]
    root = stored_root(tensors)
    edit_json(folder / "adapter_config.json", lambda content: content["ar2diff"].update(adapter_tensor_root=root))
    rewrite_ledger(log_root(adapted))(adapted, None)
    report = audit_run(adapted, only=ADAPTER_CLAIMS)
    # The files fit the lines; the lines do not fit the signatures.
    assert [claim.id for claim in report.claims if claim.verdict == "fail"] == ["A18"], render_text(report)


def test_another_parent_under_the_adapter_fails_even_by_the_keys_holder(adapted, adapter_run):
    folder = checkpoint(adapted)
    change_adapter(folder, "model.safetensors")
    root = stored_root(list_tensors(folder))
    edit_json(folder / "adapter_config.json", lambda content: content["ar2diff"].update(base_tensor_root=root))
    forge(adapted, adapter_run.signer, log_root(adapted))
    report = audit_run(adapted, only=ADAPTER_CLAIMS)
    assert [claim.id for claim in report.claims if claim.verdict == "fail"] == ["A12"], render_text(report)


def test_an_adapter_of_another_scale_fails_even_by_the_keys_holder(adapted, adapter_run):
    folder = checkpoint(adapted)
    edit_json(folder / "adapter_config.json", lambda content: content.update(lora_alpha=400.0))
    forge(adapted, adapter_run.signer, log_root(adapted))
    assert audit_run(adapted, only=("A12",)).verdict == "fail"
