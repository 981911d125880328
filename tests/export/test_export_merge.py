"""A mask-gated adapter leaves with its model: merged into every format, alone for PEFT, and in little memory."""

import json
import math
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from export_kit import ORIGINS, UNSHIFTED_BLOCKS, split_like_smollm, write_model

from ar2diff.attention.ops import causal_attend
from ar2diff.audit.claims.inventory import adapter_shapes, expected_shapes
from ar2diff.export.export import ExportOptions, export_model, verify_export
from ar2diff.export.source import PlannedTensor
from ar2diff.export.write import write_tensors
from ar2diff.models.adapter_file import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, with_own_root
from ar2diff.models.adapters import AdapterConfig, GatedAdapter, merge_adapter
from ar2diff.models.loading import load_model, save_model
from ar2diff.models.safetensors_file import read_file, write_file
from ar2diff.testing.models import MASK_ID


def adapt(folder, out):
    """The model of a folder with a random adapter, saved to `out`; returns `out`."""
    model = load_model(folder)
    adapter = GatedAdapter(model.decoder, AdapterConfig(rank=4), mask_token_id=model.diffusion.mask_token_id, seed=0)
    generator = torch.Generator().manual_seed(2)
    for parameter in adapter.parameters().values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    save_model(out, model, model.diffusion)
    return out


def read_weights(folder, target):
    if target == "gguf":
        model = load_model(folder / "model.gguf")
        return model.decoder.state_dict()
    return dict(read_file(folder / "model.safetensors"))


@pytest.mark.parametrize("target", ORIGINS)
def test_a_merged_model_becomes_what_its_merged_weights_become(target, origin, tmp_path):
    adapted = adapt(origin(target), tmp_path / "adapted")
    export_model(adapted, target, tmp_path / "merged", ExportOptions(merge=True, quantisation="f32"))
    assert verify_export(tmp_path / "merged", target) == []
    model = load_model(adapted)
    merge_adapter(model.decoder)
    save_model(tmp_path / "plain", model, model.diffusion)
    if target == "gguf":
        split_like_smollm(tmp_path / "plain")
    export_model(tmp_path / "plain", target, tmp_path / "wanted", ExportOptions(quantisation="f32"))
    wanted, found = read_weights(tmp_path / "wanted", target), read_weights(tmp_path / "merged", target)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_peft_loads_the_exported_adapter_and_gives_the_draft_modes_logits(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    parent = write_model(tmp_path / "model", "Llama", MASK_ID, UNSHIFTED_BLOCKS)
    adapted = adapt(parent, tmp_path / "adapted")
    export_model(adapted, "adapter", tmp_path / "out", ExportOptions())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = LlamaForCausalLM.from_pretrained(parent, attn_implementation="sdpa").eval()
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    ids = torch.tensor([[*b"some text", MASK_ID, MASK_ID]])
    model = load_model(adapted)

    def compute():
        attend = causal_attend(model.config.softmax_scale)
        return model.decoder.logits(model.decoder(ids, torch.arange(ids.shape[1])[None], attend))

    with torch.inference_mode():
        parents = compute()
        merge_adapter(model.decoder)
        wanted, found = compute(), theirs(input_ids=ids).logits
    # The mask's column is no word: its row is the head's own in one and the trained one in the other.
    columns = [idx for idx in range(wanted.shape[-1]) if idx != MASK_ID]
    torch.testing.assert_close(found[..., columns], wanted[..., columns], atol=1e-4, rtol=1e-4)
    assert (parents - wanted).abs().max() > 0.1


def break_rank(folder):
    content = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**content, "r": 8}))


def change_tensors(change):
    def edit(folder):
        tensors = dict(read_file(folder / ADAPTER_WEIGHTS_NAME))
        change(tensors)
        write_adapter_tensors(folder, tensors)

    return edit


def write_adapter_tensors(folder, tensors):
    """Other tensors, and a config that names their root."""
    write_file(folder / ADAPTER_WEIGHTS_NAME, tensors)
    path = folder / ADAPTER_CONFIG_NAME
    path.write_text(json.dumps(with_own_root(json.loads(path.read_text()), tensors)))


def drop(ending):
    return change_tensors(lambda tensors: tensors.pop(next(name for name in tensors if name.endswith(ending))))


BROKEN = {
    "another rank": (break_rank, "rank"),
    "half of a pair": (drop("lora_B.weight"), "pairs"),
    "no mask row": (drop("trainable_tokens_delta"), "mask row"),
    "no weights": (lambda folder: (folder / ADAPTER_WEIGHTS_NAME).unlink(), "files"),
    "no gate rule": (lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'), "files"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_verifier_names_what_is_broken_in_an_adapter(name, origin, tmp_path):
    export_model(adapt(origin("hf"), tmp_path / "adapted"), "adapter", tmp_path / "out", ExportOptions())
    assert verify_export(tmp_path / "out", "adapter") == []
    edit, check = BROKEN[name]
    edit(tmp_path / "out")
    assert check in [finding.check for finding in verify_export(tmp_path / "out", "adapter")]


LAYERS, WIDTH, INNER = 11, 1024, 4096
# The kernel's own mark of this program: ru_maxrss would begin with the peak of whoever started it.
PEAK = """
import sys
from pathlib import Path
from ar2diff.export.export import ExportOptions, export_model
export_model(Path(sys.argv[1]), "hf", Path(sys.argv[2]), ExportOptions(merge=sys.argv[3] == "merge"))
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


@pytest.fixture(scope="module")
def sharded(origin, tmp_path_factory):
    """A wide model in several shards with an adapter, each tensor of one value; and its largest tensor's bytes."""
    scratch = tmp_path_factory.mktemp("sharded")
    small, out = adapt(origin("hf"), scratch / "small"), scratch / "wide"
    out.mkdir()
    for path in small.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((small / "config.json").read_text())
    config |= {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": WIDTH // 16}
    (out / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(config)
    plan = [
        PlannedTensor(name=name, shape=shape, build=lambda shape=shape: torch.full(shape, 0.02))
        for name, shape in shapes.items()
    ]
    write_tensors(out, plan, torch.float32, shard_bytes=120_000_000)
    pairs = adapter_shapes(config, json.loads((small / "adapter_config.json").read_text()))
    write_adapter_tensors(out, {name: torch.full(shape, 0.01) for name, shape in pairs.items()})
    return out, 4 * max(math.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize("kind", ["shards", "merge"])
def test_peak_memory_stays_under_two_tensors_and_500_mib(kind, sharded, tmp_path):
    folder, largest = sharded
    if kind == "shards":
        plain = tmp_path / "plain"
        shutil.copytree(folder, plain, copy_function=lambda a, b: Path(b).hardlink_to(a))
        for path in plain.glob("adapter*"):
            path.unlink()
        folder = plain
    stored = sum(path.stat().st_size for path in folder.glob("model-*.safetensors"))
    limit = 2 * largest + 500 * 1024**2
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    assert stored > limit
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "out"), kind],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < limit
