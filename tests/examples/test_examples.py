"""Every example runs on a tiny converted model."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from ar2diff.models.loading import save_model
from ar2diff.testing.models import tiny_diffusion, tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    diffusion = tiny_diffusion()
    save_model(folder, tiny_model(seed=0, diffusion=diffusion), diffusion)
    return folder


def test_the_denoising_example_ends_with_no_mask_left(checkpoint, capsys):
    text = load_example("denoise").denoise(checkpoint, "hello", max_tokens=12)
    lines = capsys.readouterr().out.splitlines()
    assert "_" in lines[0]
    assert "_" not in lines[-1]
    assert isinstance(text, str)


def test_the_comparison_example_finds_verified_equal_to_ar(checkpoint):
    answers = load_example("compare_modes").compare_modes(checkpoint, "hello", max_tokens=12)
    assert answers["verified"].token_ids == answers["ar"].token_ids
    assert set(answers) == {"diffusion", "verified", "ar"}


def test_every_example_is_tested():
    elsewhere = {"llama_cpp_blocks"}  # tests/export/test_llama_cpp.py
    tested = {"denoise", "compare_modes"} | elsewhere
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
