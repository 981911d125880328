"""Roots computed from bytes without torch equal those that torch computes, and damaged files are refused."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from made_run import model_files

from ar2diff.audit.claims.inventory import expected_shapes, shape_of
from ar2diff.audit.tensor_files import both_roots, list_tensors, stored_root
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import load_model, named_tensors
from ar2diff.models.roots import root_of_tensors
from ar2diff.testing.models import tiny_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_roots_from_bytes_are_the_roots_of_a_strict_load(tmp_path, dtype):
    model_files(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in safetensors.torch.load_file(path).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, path)
    loaded = load_model(tmp_path)
    roots = both_roots(list_tensors(tmp_path), tied_head=True)
    assert roots.stored == stored_root(list_tensors(tmp_path)) == loaded.tensor_root
    assert roots.live == root_of_tensors(named_tensors(loaded.decoder, loaded.hf_config))


def test_the_shapes_of_a_config_are_those_of_its_decoder(tmp_path):
    files = model_files(tmp_path)
    loaded = load_model(tmp_path)
    live = {name: tuple(t.shape) for name, t in named_tensors(loaded.decoder, loaded.hf_config).items()}
    assert expected_shapes(json.loads(files["config.json"])) == live


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"

    def write(header, size):
        raw = json.dumps(header).encode() if not isinstance(header, bytes) else header
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(size))

    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    cases = [
        ({"a": entry}, 9),
        ({"a": entry}, 7),
        ({"a": entry, "b": entry}, 8),
        ({"a": {**entry, "shape": [3]}}, 8),
        ({"a": {**entry, "dtype": "X"}}, 8),
        ({"a": {**entry, "shape": [-2]}}, 8),
        (b'{"a": 1, "a": 2}', 0),
    ]
    for header, size in cases:
        write(header, size)
        with pytest.raises(ValueError, match=r"."):
            list_tensors(tmp_path)
    write({"a": entry}, 8)
    assert list_tensors(tmp_path)[0].shape == (2,)
    assert np.prod(list_tensors(tmp_path)[0].shape) == 2


@pytest.mark.parametrize(
    "switches",
    [
        {"tied_head": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
        {"qk_norm": "head", "head_dim": 16},
        {"qk_norm": "flat", "norm_placement": "post"},
        {"norm_placement": "sandwich", "num_kv_heads": 1},
    ],
)
def test_every_switch_of_a_decoder_has_its_shapes(switches):
    config = tiny_config(**switches)
    live = {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}
    assert {name: shape_of(name, config) for name in live} == live
