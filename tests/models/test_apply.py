"""An exported adapter on its base is the checkpoint that it came from; on any other it is refused by its cause."""

import dataclasses
import json
import shutil

import gguf
import pytest
import torch
from test_gguf import write_gguf

from ar2diff.audit.verify import audit_run
from ar2diff.cli import run as run_command
from ar2diff.clock import SystemClock
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError, ConfigError, ModelError, SpaceError
from ar2diff.export.export import ExportOptions, export_model
from ar2diff.models.adapter_file import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_DIFFUSION_NAME,
    ADAPTER_WEIGHTS_NAME,
    EXPORTED_NAMES,
    read_adapter,
)
from ar2diff.models.adapters import AdapterConfig, GatedAdapter
from ar2diff.models.apply import apply_adapter
from ar2diff.models.loading import load_model, named_tensors, save_model
from ar2diff.models.roots import root_of_tensors
from ar2diff.models.safetensors_file import read_file, write_file
from ar2diff.provenance.ledger import Ledger
from ar2diff.testing.models import MASK_ID, tiny_diffusion, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.config import TrainConfig
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.optim import OptimConfig
from ar2diff.train.trainer import train

CONFIG = TrainConfig(
    objective=ObjectiveConfig(block_sizes=(4,), ar_weight=0.0, anchor="last"),
    optim=OptimConfig(lr=1e-2),
    steps=4,
    micro=2,
    row_len=64,
    adapter=AdapterConfig(rank=4, alpha=8.0),
)
REQUESTS = {
    "ar": Request(prompt_ids=tuple(range(97, 110)), max_tokens=20, mode="ar"),
    "verified": Request(prompt_ids=tuple(range(97, 110)), max_tokens=20, mode="verified"),
    "diffusion": Request(prompt_ids=tuple(range(97, 110)), max_tokens=20, policy="threshold", policy_parameter=0.9),
}


@dataclasses.dataclass(frozen=True)
class Made:
    """A base, the checkpoint that an adapter was trained into, and the adapter as exported."""

    base: object
    checkpoint: object
    adapter: object


def save_quantised(folder):
    folder.mkdir()
    model = tiny_model(0, intermediate_size=64)
    return write_gguf(folder / "model.gguf", model, quantise=gguf.GGMLQuantizationType.Q8_0)


def make(folder, base):
    write_tiny_shard(folder / "data")
    result = train(CONFIG, base, folder / "data", folder / "run", clock=SystemClock())
    export_model(result.checkpoint, "adapter", folder / "adapter", ExportOptions())
    return Made(base, result.checkpoint, folder / "adapter")


def save_base(folder, **shape):
    save_model(folder, tiny_model(0, **shape), None)
    return folder


def save_without_mask(folder):
    """A base whose tokenizer knows no mask, so that training adds a row."""
    save_base(folder, tied_head=False)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|mask|>", "<|spare|>"))
    return folder


BASES = {
    "a reserved row": save_base,
    "a head of its own": lambda folder: save_base(folder, tied_head=False),
    "a new row": save_without_mask,
    "a quantised file": save_quantised,
}


@pytest.fixture(scope="module", params=BASES)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return make(folder, BASES[request.param](folder / "base"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return make(folder, save_base(folder / "base"))


@pytest.fixture
def adapter(plain, tmp_path):
    """A copy of the adapter, to be spoilt."""
    return shutil.copytree(plain.adapter, tmp_path / "adapter")


def answers(folder):
    engine = Engine(load_model(folder), clock=SystemClock())
    made = {name: engine.generate(request) for name, request in REQUESTS.items()}
    return {name: (answer.token_ids, answer.logprobs, answer.num_forward_passes) for name, answer in made.items()}


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_own(folder, **changes):
    """Other values in the `ar2diff` entry of adapter_config.json."""
    own = json.loads((folder / ADAPTER_CONFIG_NAME).read_text())["ar2diff"]
    edit_json(folder / ADAPTER_CONFIG_NAME, ar2diff={**own, **changes})


def test_an_applied_adapter_answers_as_the_checkpoint_that_it_came_from(made, tmp_path):
    applied = apply_adapter(made.base, made.adapter, tmp_path / "out")
    again, trained = load_model(tmp_path / "out"), load_model(made.checkpoint)
    assert applied.tensor_root == again.tensor_root == trained.tensor_root
    assert applied.base_tensor_root == load_model(made.base).tensor_root
    assert again.diffusion == trained.diffusion
    assert again.diffusion.anchor == "last"
    assert answers(tmp_path / "out") == answers(made.checkpoint)
    for path in made.checkpoint.iterdir():
        if path.name not in ("optimizer.safetensors", "training.json", "COMPLETE"):
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_trained_adapter_is_not_the_parent(plain):
    # Else the equality above would say nothing of the adapter's matrices.
    diffusion = answers(plain.checkpoint)["diffusion"]
    stored = read_adapter(plain.checkpoint)
    assert any(tensor.any() for name, tensor in stored.tensors.items() if ".lora_B." in name)
    assert diffusion != answers(plain.checkpoint)["ar"]


def test_every_value_of_the_base_but_the_masks_row_is_kept(made, tmp_path):
    apply_adapter(made.base, made.adapter, tmp_path / "out")
    mask = load_model(tmp_path / "out").diffusion.mask_token_id
    before, after = (load_model(folder).decoder.state_dict() for folder in (made.base, tmp_path / "out"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        kept = torch.ones(after[name].shape[0], dtype=torch.bool)
        if after[name].shape != tensor.shape or name == "embedding.weight":
            kept[mask] = False
        found = after[name][kept]
        assert torch.equal(found.view(torch.int32), tensor[kept[: len(tensor)]].view(torch.int32)), name


def test_the_adapters_files_are_kept_byte_for_byte_whoever_wrote_them(plain, adapter, tmp_path):
    path = adapter / ADAPTER_CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7, sort_keys=True))
    applied = apply_adapter(plain.base, adapter, tmp_path / "out")
    for name in EXPORTED_NAMES:
        assert (tmp_path / "out" / name).read_bytes() == (adapter / name).read_bytes()
    assert set(applied.files) == set(EXPORTED_NAMES)


def test_doing_it_again_changes_nothing_and_another_content_is_refused(plain, tmp_path):
    out = tmp_path / "out"
    assert apply_adapter(plain.base, plain.adapter, out).is_new
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert not apply_adapter(plain.base, plain.adapter, out).is_new
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    for spoil in (lambda: (out / "notes.txt").write_text("x"), lambda: (out / "config.json").write_text("{}")):
        spoil()
        content = {path: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(ConfigError, match="holds something else"):
            apply_adapter(plain.base, plain.adapter, out)
        assert {path: path.read_bytes() for path in out.iterdir()} == content
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="holds something else"):
        apply_adapter(plain.base, plain.adapter, tmp_path / "file")


def test_another_base_is_refused_and_both_roots_are_named(plain, tmp_path):
    save_model(tmp_path / "other", tiny_model(1), None)
    wanted = read_adapter(plain.adapter).base_tensor_root
    with pytest.raises(ModelError, match="another base") as caught:
        apply_adapter(tmp_path / "other", plain.adapter, tmp_path / "out")
    first, second = str(caught.value.given).split(", ")
    assert wanted in second
    assert wanted not in first
    assert len(first.split()[2]) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("shape", [{"hidden_size": 64}, {"num_layers": 1}, {"vocab_size": 300}])
def test_a_base_of_another_shape_is_refused(plain, tmp_path, shape):
    save_model(tmp_path / "other", tiny_model(0, **shape), None)
    with pytest.raises(ModelError):
        apply_adapter(tmp_path / "other", plain.adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_with_an_adapter_is_refused(plain, tmp_path):
    with pytest.raises(ModelError, match="has an adapter already"):
        apply_adapter(plain.checkpoint, plain.adapter, tmp_path / "out")


@pytest.mark.parametrize("name", EXPORTED_NAMES)
@pytest.mark.parametrize("spoil", ["missing", "empty", "cut"])
def test_a_missing_or_cut_file_is_refused_before_anything_is_written(plain, adapter, tmp_path, name, spoil):
    content = (adapter / name).read_bytes()
    (adapter / name).unlink()
    if spoil != "missing":
        (adapter / name).write_bytes(content[: len(content) // 2 if spoil == "cut" else 0])
    with pytest.raises(ModelError):
        apply_adapter(plain.base, adapter, tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
def test_a_changed_byte_of_the_weights_is_refused(plain, adapter, tmp_path, share):
    content = bytearray((adapter / ADAPTER_WEIGHTS_NAME).read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header + int((len(content) - header - 1) * share)] ^= 1
    (adapter / ADAPTER_WEIGHTS_NAME).write_bytes(bytes(content))
    with pytest.raises(ModelError, match="are not those that"):
        apply_adapter(plain.base, adapter, tmp_path / "out")


def test_a_changed_mask_row_is_refused_by_the_root_of_the_base_alone(plain, adapter, tmp_path):
    # Adapters from before their own root was written have no other guard.
    tensors = dict(read_file(adapter / ADAPTER_WEIGHTS_NAME))
    name = next(name for name in tensors if name.endswith("trainable_tokens_delta"))
    write_file(adapter / ADAPTER_WEIGHTS_NAME, {**tensors, name: tensors[name] + 0.5})
    own = json.loads((adapter / ADAPTER_CONFIG_NAME).read_text())["ar2diff"]
    own.pop("adapter_tensor_root")
    edit_json(adapter / ADAPTER_CONFIG_NAME, ar2diff=own)
    with pytest.raises(ModelError, match="another base"):
        apply_adapter(plain.base, adapter, tmp_path / "out")


@pytest.mark.parametrize("mask", [261, 2**40, -1])
def test_a_mask_token_outside_of_the_vocabulary_is_refused(plain, adapter, tmp_path, mask):
    edit_own(adapter, mask_token_id=mask)
    edit_json(adapter / ADAPTER_DIFFUSION_NAME, mask_token_id=mask)
    with pytest.raises(ModelError, match="mask"):
        apply_adapter(plain.base, adapter, tmp_path / "out")


FOREIGN = {
    "another mask in one file": lambda folder: edit_json(folder / ADAPTER_DIFFUSION_NAME, mask_token_id=65),
    "another token as mask": lambda folder: (
        edit_json(folder / ADAPTER_DIFFUSION_NAME, mask_token_id=65),
        edit_own(folder, mask_token_id=65),
    ),
    "no settings": lambda folder: (folder / ADAPTER_DIFFUSION_NAME).write_text("[]"),
    "unknown settings": lambda folder: edit_json(folder / ADAPTER_DIFFUSION_NAME, colour="red"),
    "blocks beyond the context": lambda folder: edit_json(
        folder / ADAPTER_DIFFUSION_NAME, block_size=512, trained_block_sizes=[512]
    ),
    "no gate": lambda folder: edit_json(folder / ADAPTER_CONFIG_NAME, ar2diff=None),
    "another rank": lambda folder: edit_json(folder / ADAPTER_CONFIG_NAME, r=8),
    "other layers": lambda folder: edit_json(folder / ADAPTER_CONFIG_NAME, target_modules=["q_proj"]),
    "another kind": lambda folder: edit_json(folder / ADAPTER_CONFIG_NAME, peft_type="IA3"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_adapter_is_refused_and_leaves_nothing(plain, adapter, tmp_path, name):
    FOREIGN[name](adapter)
    with pytest.raises(ModelError):
        apply_adapter(plain.base, adapter, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_root_that_is_none_is_named_wherever_the_adapter_is_read(plain, adapter):
    edit_own(adapter, base_tensor_root=7)
    with pytest.raises(ModelError, match="names no tensor root"):
        read_adapter(adapter)


def test_an_adapter_of_a_converted_base_goes_on_that_base(tmp_path):
    converted = tiny_model(2, diffusion=tiny_diffusion())
    save_model(tmp_path / "base", converted, converted.diffusion)
    GatedAdapter(converted.decoder, AdapterConfig(rank=2), mask_token_id=MASK_ID, seed=0)
    save_model(tmp_path / "whole", converted, converted.diffusion)
    export_model(tmp_path / "whole", "adapter", tmp_path / "adapter", ExportOptions())
    root = apply_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out").tensor_root
    assert root == load_model(tmp_path / "whole").tensor_root


def test_a_full_disk_leaves_nothing_behind(plain, tmp_path, monkeypatch):
    def refuse(*_):
        raise SpaceError("full")

    monkeypatch.setattr("ar2diff.models.safetensors_file.check_free_space", refuse)
    with pytest.raises(SpaceError):
        apply_adapter(plain.base, plain.adapter, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_folder_that_other_commands_take_and_says_its_roots(plain, tmp_path, capsys):
    words = ["apply", str(plain.base), str(plain.adapter), "--out", str(tmp_path / "out")]
    assert run_command(words) == 0
    first = capsys.readouterr().out
    assert first.startswith(f"wrote {tmp_path / 'out'}\n")
    assert load_model(tmp_path / "out").tensor_root in first
    assert run_command(words) == 0
    assert capsys.readouterr().out.startswith("already there, and verified:")
    assert run_command(["export", str(tmp_path / "out"), "--to", "adapter", "--out", str(tmp_path / "again")]) == 0
    for name in EXPORTED_NAMES:
        assert (tmp_path / "again" / name).read_bytes() == (plain.adapter / name).read_bytes()
    capsys.readouterr()
    assert run_command([*words[:-1], str(plain.base)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_applied_folder_is_trained_on(plain, tmp_path):
    apply_adapter(plain.base, plain.adapter, tmp_path / "start")
    data = plain.checkpoint.parents[1].parent / "data"
    result = train(CONFIG, tmp_path / "start", data, tmp_path / "run", clock=SystemClock())
    start, end = read_adapter(tmp_path / "start"), read_adapter(result.checkpoint)
    assert start.tensors.keys() == end.tensors.keys()
    other = dataclasses.replace(CONFIG, adapter=AdapterConfig(rank=2))
    with pytest.raises(Ar2diffError, match="has an adapter"):
        train(other, tmp_path / "start", data, tmp_path / "other", clock=SystemClock())


def log_start(run, made):
    """A run that was trained from the applied adapter, as far as its ledger tells."""
    shutil.copytree(made.base if made.base.is_dir() else made.base.parent, run / "base")
    applied = apply_adapter(made.base, made.adapter, run / "start")
    loaded = load_model(run / "start")
    started = {
        "config": CONFIG.as_json(),
        "base": "base",
        "base_tensor_root": applied.tensor_root,
        "live_tensor_root": root_of_tensors(named_tensors(loaded.decoder, loaded.hf_config)),
        "mask_token_id": loaded.diffusion.mask_token_id,
        "missing": [],
        "unexpected": [],
    }
    roots = {"base_tensor_root": applied.base_tensor_root, "tensor_root": applied.tensor_root}
    with Ledger.open(run, clock=SystemClock(), run_id="tiny") as ledger:
        data = {"source": "local:adapter", "folder": "start", "files": applied.files, **roots}
        ledger.append("adapter_applied", data)
        ledger.append("train_started", started)


def failed(run):
    return [check.what for check in audit_run(run, only=("A3",)).find("A3").checks if check.verdict == "fail"]


def test_the_audit_finds_every_kind_of_base_under_its_adapter_and_no_other(made, tmp_path):
    log_start(tmp_path / "run", made)
    assert failed(tmp_path / "run") == []
    edit_json(tmp_path / "run/start/config.json", rope_theta=5e5)
    assert failed(tmp_path / "run") == ["settings that are not the base's"]
    edit_json(tmp_path / "run/start/config.json", rope_theta=10000.0)
    path = tmp_path / "run/start/model.safetensors"
    tensors = dict(read_file(path))
    name = next(name for name in tensors if "q_proj" in name)
    write_file(path, {**tensors, name: tensors[name] + 0.5})
    assert "tensors under the adapter that are not the base's" in failed(tmp_path / "run")
