"""The doctor says what a base allows: mask row, targets with reasons, memory, speed, chat template."""

import json
from dataclasses import replace

import pytest
import torch

from ar2diff.cli import run as run_command
from ar2diff.clock import SystemClock
from ar2diff.errors import ModelError, UnsupportedModelError
from ar2diff.export.matrix import TARGETS
from ar2diff.models.adapters import AdapterConfig, GatedAdapter
from ar2diff.models.decoder import Decoder
from ar2diff.models.loading import load_model, save_model
from ar2diff.models.mask_token import add_mask_token
from ar2diff.pipelines.doctor import examine, examine_template, list_base_targets
from ar2diff.testing.models import MASK_ID, byte_tokenizer, tiny_config, tiny_diffusion, tiny_model
from ar2diff.tokenizer import Tokenizer
from ar2diff.train.config import TrainConfig
from ar2diff.train.estimates import (
    build_trial_batch,
    count_adapter,
    count_parameters,
    flops_per_token,
    layer_activation_bytes,
    measure_speed,
)
from ar2diff.train.forward import forward_states
from ar2diff.train.mask_row import MaskRow
from ar2diff.train.objective import ObjectiveConfig, find_preset
from ar2diff.train.optim import trained_parameters

TRAIN = TrainConfig(steps=1, micro=2, row_len=64, objective=ObjectiveConfig(block_sizes=(4,)))


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (ObjectiveConfig(block_sizes=(4,)), {"hf", "gguf", "adapter"}),
        (ObjectiveConfig(block_sizes=(4,), anchor="last"), {"adapter"}),
        (find_preset("sdar"), {"stable-diffcoder", "llada2-dense", "hf", "gguf", "adapter"}),
    ],
)
def test_targets_follow_from_the_objective_and_every_closed_one_says_why(tiny_parent, objective, expected):
    found = examine(tiny_parent, replace(TRAIN, objective=objective), clock=SystemClock(), measure=False)
    assert {target.name for target in found.targets if target.is_open} == expected
    assert [target.name for target in found.targets] == list(TARGETS)
    assert all(target.is_open or all(target.reasons) for target in found.targets)
    sdar = next(target for target in found.targets if target.name == "sdar")
    assert "151669" in " ".join(sdar.reasons)


def test_the_mask_row_is_the_one_that_training_takes_and_a_near_zero_row_is_called_so(tmp_path):
    loaded = tiny_model(1)
    loaded.decoder.embedding.weight.data[MASK_ID] *= 1e-4
    save_model(tmp_path / "m", loaded, None)
    found = examine(tmp_path / "m", TRAIN, clock=SystemClock(), measure=False)
    _, token = add_mask_token(load_model(tmp_path / "m"))
    assert (found.mask.id, found.mask.text) == (token.id, token.text) == (MASK_ID, "<|mask|>")
    norms = loaded.decoder.embedding.weight.detach().norm(dim=1)
    others = torch.cat((norms[:MASK_ID], norms[MASK_ID + 1 :]))
    assert found.mask.is_near_zero
    assert found.mask.row_norm == pytest.approx(float(norms[MASK_ID]))
    assert found.mask.median_norm == pytest.approx(float(others.median()))
    assert not examine_row(tmp_path, tiny_model(2)).is_near_zero


def examine_row(folder, loaded):
    save_model(folder / "other", loaded, None)
    return examine(folder / "other", TRAIN, clock=SystemClock(), measure=False).mask


def test_a_converted_model_is_described_by_its_own_settings_not_by_the_objective(tmp_path):
    diffusion = tiny_diffusion(shift_logits=False, clean_attention="block")
    save_model(tmp_path / "m", tiny_model(1, diffusion=diffusion), diffusion)
    found = examine(tmp_path / "m", TRAIN, clock=SystemClock(), measure=False)
    assert (found.diffusion, found.shift_logits, found.clean_attention) == (diffusion, False, "block")
    assert "stable-diffcoder" in {target.name for target in found.targets if target.is_open}


def kept_bytes(config, train):
    """What the backward pass keeps in memory, parameters left out."""
    decoder = Decoder(config)
    if train.adapter is not None:
        GatedAdapter(decoder, train.adapter, mask_token_id=MASK_ID, seed=0)
    trained_parameters(decoder, MaskRow(decoder, MASK_ID))
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor
        return tensor

    batch = build_trial_batch(config, train, mask_token_id=MASK_ID)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward_states(decoder, batch)
    noisy = sum(span.end - span.noisy_start for span in batch.layout.spans)
    tokens = len(batch.token_ids_L) if train.adapter is None else noisy
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens


@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=4)])
def test_estimated_activations_are_those_that_a_layer_keeps(adapter):
    config = tiny_config(hidden_size=64, intermediate_size=128, num_heads=8, num_kv_heads=4)
    objective = replace(TRAIN.objective, ar_weight=0.0)
    train = replace(TRAIN, row_len=256, adapter=adapter, objective=objective)
    one, two = (kept_bytes(replace(config, num_layers=n), train) for n in (1, 2))
    assert layer_activation_bytes(config, bf16=False) == pytest.approx(two - one, rel=0.3)


def test_parameters_and_memory_are_counted_as_training_has_them(tiny_parent):
    loaded = load_model(tiny_parent)
    count = count_parameters(loaded.config)
    assert count.total == sum(parameter.numel() for parameter in loaded.decoder.parameters())
    found = examine(tiny_parent, TRAIN, clock=SystemClock(), measure=False)
    assert found.full.weights == 4 * count.total
    assert found.full.training == 12 * count.layers
    twice = examine(tiny_parent, replace(TRAIN, micro=4), clock=SystemClock(), measure=False)
    assert twice.full.activations == 2 * found.full.activations
    assert found.adapter.training < found.full.training
    adapter = GatedAdapter(loaded.decoder, AdapterConfig(), mask_token_id=MASK_ID, seed=0)
    trained = sum(parameter.numel() for parameter in adapter.parameters().values())
    assert count_adapter(loaded.config, AdapterConfig()) == trained


def test_a_copy_of_the_parent_counts_where_the_run_distils_from_one(tiny_parent):
    objective = replace(TRAIN.objective, distill_weight=1.0)
    plain = examine(tiny_parent, TRAIN, clock=SystemClock(), measure=False)
    distilled = examine(tiny_parent, replace(TRAIN, objective=objective), clock=SystemClock(), measure=False)
    assert distilled.full.weights > plain.full.weights
    assert distilled.adapter.weights == plain.adapter.weights


class SteppingClock(SystemClock):
    """Every look at it is a second later."""

    def __init__(self):
        self.now = 0.0

    def seconds(self):
        self.now += 1.0
        return self.now


def test_a_trial_is_bounded_and_layers_beyond_it_are_added_by_their_cost(monkeypatch):
    config = tiny_config(num_layers=9)
    measure = {"mask_token_id": MASK_ID, "device": "cpu", "limit_s": 4.0}
    num_tokens = len(build_trial_batch(config, TRAIN, mask_token_id=MASK_ID).token_ids_L)
    assert measure_speed(config, TRAIN, clock=SteppingClock(), **measure) == num_tokens
    monkeypatch.setattr("ar2diff.train.estimates.TRIAL_PARAMETERS", 0)
    # Equal times: a tenth of a trial for each of the seven layers that were not in it.
    found = measure_speed(config, TRAIN, clock=SteppingClock(), **measure)
    assert found == pytest.approx(num_tokens / 1.7)


def test_speed_is_measured_or_left_to_arithmetic(tiny_parent):
    found = examine(tiny_parent, TRAIN, clock=SystemClock(), limit_s=0.1)
    assert found.speed.tokens_per_s > 0
    adapter = replace(TRAIN, adapter=AdapterConfig(rank=2), objective=replace(TRAIN.objective, ar_weight=0.0))
    assert examine(tiny_parent, adapter, clock=SystemClock(), limit_s=0.1).speed.tokens_per_s > 0
    unmeasured = examine(tiny_parent, TRAIN, clock=SystemClock(), measure=False).speed
    assert unmeasured.tokens_per_s is None
    assert unmeasured.flops_per_token == flops_per_token(load_model(tiny_parent).config) > 0


def with_template(template):
    return Tokenizer(byte_tokenizer()._backend, eos_token_ids=[257], chat_template=template)


@pytest.mark.parametrize(
    ("template", "thinks"),
    [
        ("{{ messages[0].content }}<|im_start|>assistant", False),
        ("{{ messages[0].content }}A:{% if enable_thinking is false %}<think></think>{% endif %}", True),
        ("{{ messages[0].content }}A:{% if not enable_thinking %}<think></think>{% endif %}", False),
        ("{{ messages[0].content }}A:<think>", True),
    ],
)
def test_thinking_is_on_where_the_template_knows_it_and_does_not_close_it(template, thinks):
    assert examine_template(with_template(template)).thinks is thinks


def test_a_template_that_is_absent_or_refuses_is_said_to():
    assert not examine_template(with_template(None)).found
    facts = examine_template(with_template("{{ raise_exception('system first') }}"))
    assert "system first" in facts.problem
    assert facts.end_texts == ("<|im_end|>",)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda folder: (folder / "config.json").unlink(), ModelError),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "mamba"}'), UnsupportedModelError),
        (lambda folder: (folder / "model.safetensors").unlink(), ModelError),
        (lambda folder: (folder / "config.json").write_text("[]"), ModelError),
    ],
)
def test_what_is_no_model_ends_in_an_error_that_says_so(tmp_path, spoil, error):
    save_model(tmp_path / "m", tiny_model(1), None)
    spoil(tmp_path / "m")
    with pytest.raises(error):
        examine(tmp_path / "m", TRAIN, clock=SystemClock(), measure=False)


def test_a_mask_beyond_the_vocabulary_is_found_as_training_would_find_it(tmp_path):
    save_model(tmp_path / "m", tiny_model(1), tiny_diffusion(mask_token_id=9999))
    with pytest.raises(ModelError, match="9999 of 260 rows"):
        examine(tmp_path / "m", TRAIN, clock=SystemClock(), measure=False)


def test_the_command_prints_every_finding_as_text_and_as_json(tiny_parent, capsys):
    assert run_command(["doctor", str(tiny_parent), "--no-measure", "--row-len", "64", "--preset", "sdar"]) == 0
    text = capsys.readouterr().out
    for word in ("llama", "<|mask|>", "open      stable-diffcoder", "closed    sdar", "GiB", "not measured"):
        assert word in text.replace("MiB", "GiB")
    assert run_command(["doctor", str(tiny_parent), "--no-measure", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["config"]["model_type"] == "llama"
    assert {target["name"] for target in content["targets"] if target["open"]} == {"hf", "gguf", "adapter"}
    assert content["full"]["total"] > content["full"]["weights"]


def test_the_command_takes_a_recipe_and_a_fetched_pin_and_refuses_what_is_neither(tiny_hub, tmp_path, capsys):
    recipe = tiny_hub.write_recipe(tmp_path)
    where = ["--endpoint", tiny_hub.endpoint, "--cache", str(tmp_path / "cache" / "downloads")]
    words = ["doctor", f"hub:tiny/parent@{tiny_hub.model}", "--no-measure", "--json", *where]
    assert run_command([*words, "--recipe", str(recipe)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["micro"], content["row_len"]) == (1, 512)
    # What was fetched stays: the hub is not asked again.
    assert run_command([*words[:-4], "--endpoint", "http://127.0.0.1:9", "--cache", where[3]]) == 0
    assert run_command(["doctor", str(tmp_path / "absent")]) == 2
    assert run_command(["doctor", "hub:tiny/parent"]) == 2


def test_training_says_at_its_start_which_targets_stay_open(tiny_parent, tmp_path, capsys):
    names = {state.name for state in list_base_targets(tiny_parent, TRAIN) if state.is_open}
    assert names == {"hf", "gguf", "adapter"}
    words = [
        "train",
        str(tiny_parent),
        "--data",
        str(tmp_path / "none"),
        "--out",
        str(tmp_path / "o"),
        "--steps",
        "1",
    ]
    assert run_command(words) == 2
    assert "export targets open: hf, gguf, adapter; closed: sdar" in capsys.readouterr().err
