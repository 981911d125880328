"""The folder for transformers, in a fresh process with transformers alone: same logits, same block-diffusion ids."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from export_kit import MASK_ID, SHIFTED_CAUSAL, UNSHIFTED_BLOCKS, write_model

from ar2diff.attention.ops import causal_attend
from ar2diff.diffusion.unmask import POLICIES
from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request
from ar2diff.export.export import ExportOptions, export_model
from ar2diff.models.loading import load_model

SCRIPT = Path(__file__).with_name("run_in_transformers.py")
IDS = list(b"a block of text")
PARAMETERS = {"top_k": None, "threshold": 0.05, "factor": 1.5, "entropy": 9.0, "left_to_right": None}
REFUSED = [{"top_p": 0.9}, {"policy": "random"}, {"block_size": 3}, {"mode": "verified"}]


def build_questions():
    chosen = random.Random(5)
    prompts = [list(chosen.randbytes(chosen.randint(1, 20))) for _ in range(20)]
    questions = [
        {
            "prompt": prompt,
            "settings": {
                "max_new_tokens": chosen.choice([1, 3, 4, 5, 11]),
                "policy": policy,
                "policy_parameter": PARAMETERS[policy],
                "block_size": chosen.choice([2, 4]),
                "denoising_steps": chosen.choice([None, 1, 2, 3]),
            },
        }
        for policy in POLICIES
        for prompt in prompts
    ]
    return {"ids": IDS, "generate": questions, "refused": REFUSED}


@pytest.fixture(scope="module", params=["shifted, causal", "unshifted, blocks"])
def told(request, tmp_path_factory):
    """A model, and what transformers says about its export."""
    folder = tmp_path_factory.mktemp("hf")
    conversion = SHIFTED_CAUSAL if request.param == "shifted, causal" else UNSHIFTED_BLOCKS
    origin = write_model(folder / "model", "Llama", MASK_ID, conversion, tie_word_embeddings=True)
    export_model(origin, "hf", folder / "export", ExportOptions())
    questions = build_questions()
    (folder / "questions.json").write_text(json.dumps(questions))
    paths = [str(folder / name) for name in ("export", "questions.json", "answers.json")]
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *paths],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load_model(origin), questions, json.loads((folder / "answers.json").read_text())


def test_logits_of_the_clean_stream_are_ours(told):
    model, _, said = told
    places = torch.arange(len(IDS))[None]
    with torch.inference_mode():
        hidden = model.decoder(torch.tensor([IDS]), places, causal_attend(model.config.softmax_scale))
        ours = model.decoder.logits(hidden)[0]
    torch.testing.assert_close(torch.tensor(said["logits"]), ours, atol=1e-4, rtol=1e-4)


def test_generate_gives_the_reference_ids_in_every_policy(told):
    model, questions, said = told
    for question, answer in zip(questions["generate"], said["answers"], strict=True):
        settings = question["settings"]
        wanted = generate_reference(
            model,
            Request(
                prompt_ids=tuple(question["prompt"]),
                max_tokens=settings["max_new_tokens"],
                policy=settings["policy"],
                policy_parameter=settings["policy_parameter"],
                block_size=settings["block_size"],
                denoising_steps=settings["denoising_steps"],
            ),
        ).token_ids
        ends = model.tokenizer.eos_token_ids
        assert tuple(token for token in answer if token not in ends) == wanted, question


def test_a_setting_that_generate_lacks_is_refused_not_ignored(told):
    _, _, said = told
    assert len(said["refused"]) == len(REFUSED)
    assert "top_p" in said["refused"][0]


def test_a_padded_batch_answers_as_its_rows_alone(told):
    _, _, said = told
    for row, alone in zip(said["batch"], said["alone"], strict=True):
        assert row[: len(alone)] == alone
