"""llama.cpp runs an exported file: the ids of our AR mode, and of our diffusion mode by the loop of the example."""

import importlib.util
import random
from pathlib import Path

import pytest
from export_kit import MASK_ID, SHIFTED_BLOCKS, SHIFTED_CAUSAL, UNSHIFTED_BLOCKS, split_like_smollm, write_model

from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request
from ar2diff.export.export import ExportOptions, export_model
from ar2diff.models.loading import load_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_cpp_blocks.py"
NUM_PROMPTS, MAX_TOKENS = 20, 11


def load_example():
    spec = importlib.util.spec_from_file_location("llama_cpp_blocks", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = {
    "llama, shifted, causal": ("Llama", SHIFTED_CAUSAL),
    "llama, shifted, blocks": ("Llama", SHIFTED_BLOCKS),
    "qwen2, unshifted, blocks": ("Qwen2", UNSHIFTED_BLOCKS),
    "qwen3, shifted, causal": ("Qwen3", SHIFTED_CAUSAL),
}


WITH_AR_MODE = [name for name, (_, conversion) in CASES.items() if conversion is SHIFTED_CAUSAL]


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """A model, and llama.cpp over its file."""
    folder = tmp_path_factory.mktemp("llama")
    family, conversion = CASES[request.param]
    # 64 is four heads of 16: llama.cpp's Qwen2 knows no other width of a head.
    origin = write_model(folder / "model", family, MASK_ID, conversion, hidden_size=64)
    split_like_smollm(origin)
    export_model(origin, "gguf", folder / "out", ExportOptions(quantisation="f32"))
    return load_model(origin), load_example().BlockDecoder(folder / "out" / "model.gguf", context_len=128)


@pytest.fixture(scope="module")
def prompts():
    chosen = random.Random(3)
    return [tuple(chosen.randbytes(chosen.randint(1, 20))) for _ in range(NUM_PROMPTS)]


def ask(model, prompt, **settings):
    return generate_reference(model, Request(prompt_ids=prompt, max_tokens=MAX_TOKENS, **settings)).token_ids


@pytest.mark.parametrize("pair", WITH_AR_MODE, indirect=True)
def test_the_ids_of_the_ar_mode_are_those_of_llama_cpp(pair, prompts):
    model, decoder = pair
    for prompt in prompts:
        ids = decoder.decode_tokens(prompt, MAX_TOKENS)
        assert ids == list(ask(model, prompt, mode="ar"))


@pytest.mark.parametrize("pair", list(CASES), indirect=True)
@pytest.mark.parametrize("steps", [1, 3])
def test_blocks_over_the_cache_of_llama_cpp_give_the_ids_of_the_diffusion_mode(pair, prompts, steps):
    model, decoder = pair
    for prompt in prompts:
        ids = decoder.decode_blocks(prompt, MAX_TOKENS, steps)
        assert ids == list(ask(model, prompt, policy="top_k", denoising_steps=steps))
