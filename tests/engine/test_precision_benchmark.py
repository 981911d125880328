"""The benchmark of precisions runs whole on a tiny model, and its comparison is the divergence that it names."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "precision.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("precision_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_quick_run_prints_its_document_last_and_writes_the_same_to_a_file(tmp_path, library_dir):
    out = tmp_path / "precision.json"
    line = [sys.executable, str(SCRIPT), "--quick", "--library-dir", str(library_dir), "--out", str(out)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads(out.read_text())
    narrow = set(document["divergence"])
    assert narrow >= {"bf16"}
    assert narrow | {name for name, said in document["precisions"].items() if said.startswith("ABSENT")} >= {"int8"}
    for name in narrow:
        assert set(document["divergence"][name]) == {"ar", "masked"}
        assert all(0 < figures["mean_kl"] <= figures["max_kl"] for figures in document["divergence"][name].values())
    assert document["bytes"]["bf16"]["weight_bytes"] * 2 == document["bytes"]["fp32"]["weight_bytes"]
    fp32 = document["answers"]["fp32"]["ar"]
    assert (fp32["equal_answers"], fp32["change"]) == (fp32["num_problems"], 0)
    assert len(document["bars"]) == 4 * len(narrow)


def test_divergence_is_that_of_the_definition_and_ignores_what_is_never_emitted(script):
    wide = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]]).log()
    narrow = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]).log()
    kl, equal = script.compare_rows(wide, narrow + 3.0)
    assert kl.tolist() == pytest.approx([0.25 * math.log(0.5) + 0.75 * math.log(1.5), 0.0], abs=1e-7)
    assert equal.tolist() == [False, True]


def test_forced_rows_are_those_that_decoding_sees(script, kit):
    engine = kit.engine(kit.loaded(block_size=4))
    asked = {"prompt_ids": (10, 11, 12, 13, 14), "logit_bias": {kit.END: -100.0}}
    ar = engine.generate(script.Request(mode="ar", max_tokens=10, **asked))
    session = engine.open_session(script.Request(mode="ar", max_tokens=30, **asked))
    with torch.inference_mode():
        rows = engine.passes.run_alone(script.force(session, ar.token_ids), session.cache)
    assert rows["ar"].argmax(dim=-1).tolist() == list(ar.token_ids)
    # Blocks of an anchor and three masked places; the last one is cut off after its second token.
    assert len(rows["masked"]) == 3 + 3 + 1
    # The diffusion mode's first block starts from the same anchor: its first pass sees the same rows.
    first = engine.generate(
        script.Request(mode="diffusion", max_tokens=4, denoising_steps=1, policy="top_k", **asked)
    )
    assert rows["masked"][:3].argmax(dim=-1).tolist() == list(first.token_ids[1:])
    # And its second block, given a prompt that holds the AR answer so far.
    later = {**asked, "prompt_ids": (*asked["prompt_ids"], *ar.token_ids[:4])}
    second = engine.generate(
        script.Request(mode="diffusion", max_tokens=4, denoising_steps=1, policy="top_k", **later)
    )
    assert second.token_ids[0] == ar.token_ids[4]
    assert rows["masked"][3:6].argmax(dim=-1).tolist() == list(second.token_ids[1:])
