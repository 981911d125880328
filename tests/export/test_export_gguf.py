"""GGUF files hold the same tensors, tokenizer and mask, in every kind, and are verified."""

import json
import shutil

import gguf
import pytest
import torch
from export_kit import MASK_ID, SHIFTED_CAUSAL, split_like_smollm, write_model

from ar2diff.errors import ConfigError, UnsupportedModelError
from ar2diff.export import gguf as writer
from ar2diff.export.export import ExportOptions, export_model, verify_export
from ar2diff.models.loading import load_model, named_tensors

# Worst error of a value, as a share of its row's largest.
CLOSE = {"f32": 0.0, "f16": 1e-3, "bf16": 8e-3, "q8_0": 8e-3, "q4_0": 0.15}


def test_every_kind_loads_as_the_same_model(origin, tmp_path):
    model = load_model(origin("gguf"))
    ours = named_tensors(model.decoder, model.hf_config)
    for kind, share in CLOSE.items():
        export_model(origin("gguf"), "gguf", tmp_path / kind, ExportOptions(quantisation=kind))
        again = load_model(tmp_path / kind / "model.gguf")
        theirs = named_tensors(again.decoder, again.hf_config)
        assert theirs.keys() == ours.keys()
        for name, tensor in ours.items():
            allowed = share * tensor.abs().amax(dim=-1, keepdim=True)
            assert ((theirs[name] - tensor).abs() <= allowed).all(), (kind, name)
        text = "Größe 12: <|im_end|>"
        assert again.tokenizer.encode(text) == model.tokenizer.encode(text)
        assert again.tokenizer.eos_token_ids == model.tokenizer.eos_token_ids


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_qwen_keeps_its_biases_norms_and_row_order(family, tmp_path):
    folder = write_model(tmp_path / "model", family, MASK_ID, SHIFTED_CAUSAL, hidden_size=64)
    split_like_smollm(folder)
    export_model(folder, "gguf", tmp_path / "out", ExportOptions(quantisation="f32"))
    model, again = load_model(folder), load_model(tmp_path / "out" / "model.gguf")
    theirs = named_tensors(again.decoder, again.hf_config)
    for name, tensor in named_tensors(model.decoder, model.hf_config).items():
        assert torch.equal(theirs[name], tensor), name


def test_the_mask_and_how_to_run_a_block_are_metadata(exported):
    fields = gguf.GGUFReader(exported("gguf") / "model.gguf").fields
    stored = {name: field.contents() for name, field in fields.items()}
    assert stored["tokenizer.ggml.mask_token_id"] == MASK_ID
    assert stored["tokenizer.ggml.token_type"][MASK_ID] == 3
    assert stored["ar2diff.block_size"] == 4
    assert stored["diffusion.shift_logits"] is True


def test_the_rows_of_q_and_k_are_in_the_order_that_the_format_rotates(origin, exported):
    model = load_model(origin("gguf"))
    reader = gguf.GGUFReader(exported("gguf") / "model.gguf")
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_q.weight")
    ours = model.decoder.layers[0].attention.q_proj.weight.detach()
    half = model.config.head_dim // 2
    assert torch.equal(torch.from_numpy(stored.data.copy())[1], ours[half])


def test_a_tokenizer_without_a_name_in_gguf_is_refused_and_nothing_is_left(origin, tmp_path):
    with pytest.raises(UnsupportedModelError, match="splitting rule"):
        export_model(origin("hf"), "gguf", tmp_path / "out", ExportOptions())
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_merges_is_refused_as_llama_cpp_would(origin, tmp_path):
    shutil.copytree(origin("gguf"), tmp_path / "model")
    stored = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    stored["model"]["merges"] = []
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UnsupportedModelError, match="merges"):
        export_model(tmp_path / "model", "gguf", tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()


def test_a_qwen2_whose_heads_llama_cpp_could_not_load_is_refused(tmp_path):
    folder = write_model(tmp_path / "model", "Qwen2", MASK_ID, SHIFTED_CAUSAL)
    with pytest.raises(ConfigError, match="heads of the hidden size"):
        export_model(folder, "gguf", tmp_path / "out", ExportOptions())


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="q8_0"):
        ExportOptions(quantisation="q2_k")


def leave_out(name):
    return lambda patch: patch.setattr(gguf.GGUFWriter, name, lambda *_: None)


def leave_out_key(key):
    """A key of the metadata is never written."""

    def edit(patch):
        for name in ("add_bool", "add_uint32", "add_array", "add_string"):
            write = getattr(gguf.GGUFWriter, name)
            patch.setattr(
                gguf.GGUFWriter,
                name,
                lambda self, k, *rest, write=write: None if k == key else write(self, k, *rest),
            )

    return edit


def other_shift(patch):
    write = gguf.GGUFWriter.add_bool
    turned = lambda self, key, value: write(self, key, value != (key == "diffusion.shift_logits"))  # noqa: E731
    patch.setattr(gguf.GGUFWriter, "add_bool", turned)


def plain_mask(patch):
    write = gguf.GGUFWriter.add_token_types
    patch.setattr(gguf.GGUFWriter, "add_token_types", lambda self, kinds: write(self, [1] * len(kinds)))


def lose_a_tensor(patch):
    listed = writer._list_tensors
    patch.setattr(writer, "_list_tensors", lambda source: list(listed(source))[:-1])


BROKEN = {
    "no mask id": (leave_out("add_mask_token_id"), "mask id"),
    "a mask that is a word": (plain_mask, "mask token"),
    "no block size": (leave_out_key("ar2diff.block_size"), "settings"),
    "no word on clean attention": (leave_out_key("ar2diff.clean_attention"), "settings"),
    "another shift for llama.cpp": (other_shift, "shift"),
    "no shift for llama.cpp": (leave_out_key("diffusion.shift_logits"), "shift"),
    "a tensor is missing": (lose_a_tensor, "tensors"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_verifier_names_what_is_broken(name, origin, tmp_path, monkeypatch):
    edit, check = BROKEN[name]
    edit(monkeypatch)
    monkeypatch.setattr("ar2diff.export.export.verify_export", lambda *_: [])
    export_model(origin("gguf"), "gguf", tmp_path / "out", ExportOptions())
    monkeypatch.undo()
    assert check in [finding.check for finding in verify_export(tmp_path / "out", "gguf")]
