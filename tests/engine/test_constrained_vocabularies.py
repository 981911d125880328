"""Constraints over a vocabulary of merged pieces: tokens that span values, and halves of characters."""

import json

import jsonschema
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from ar2diff.engine.constraint import Constraint
from ar2diff.engine.request import Request
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.decoder import Decoder
from ar2diff.tokenizer import Tokenizer

MODES = ["diffusion", "verified", "ar"]
TAGS = {"type": "array", "items": {"const": "ok"}, "maxItems": 3}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["é😀", "naïve"]}, "tags": TAGS},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TEXTS = ['{"name": "é😀", "tags": ["ok", "ok"]}', '{"name":"naïve","tags":["ok"]}'] * 3


@pytest.fixture(scope="module")
def merged(kit):
    """A model over byte pieces that were merged on JSON texts, two of its ids unknown to the tokenizer."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_end|>", "<mask>", "<tool_call>"],
        max_token_length=9,
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    tokenizer = Tokenizer(backend, eos_token_ids=[0], chat_template=None)
    loaded = kit.loaded(max_seq_len=96)
    fields = {name: getattr(loaded.config, name) for name in loaded.config.__slots__}
    torch.manual_seed(3)
    loaded.config = DecoderConfig(**{**fields, "vocab_size": tokenizer.vocab_size + 2})
    loaded.decoder, loaded.tokenizer = Decoder(loaded.config), tokenizer
    loaded.diffusion = DiffusionConfig(
        block_size=4, trained_block_sizes=(4,), shift_logits=True, mask_token_id=1, clean_attention="causal"
    )
    return loaded


def test_pieces_span_values_and_split_characters(merged):
    pieces = [merged.tokenizer.token_bytes(idx) for idx in range(3, merged.tokenizer.vocab_size)]
    assert any(b'":' in piece for piece in pieces)
    assert b"\xc3" in pieces
    assert max(map(len, pieces)) > 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_valid_and_whole_in_any_pieces(kit, merged, mode, temperature):
    engine = kit.engine(merged)
    constraint = Constraint.json_schema(SCHEMA)
    prompt_ids = tuple(merged.tokenizer.encode("é{"))
    for seed in range(3):
        request = Request(
            prompt_ids=prompt_ids,
            max_tokens=90,
            mode=mode,
            temperature=temperature,
            seed=seed,
            constraint=constraint,
            presence_penalty=0.5,
        )
        steps = list(engine.stream(request))
        got = steps[-1].generation
        assert "".join(step.text for step in steps) == got.text
        assert not set(got.token_ids) & {0, 1, 2, merged.tokenizer.vocab_size, merged.tokenizer.vocab_size + 1}
        assert got.finish_reason == "stop"
        jsonschema.validate(json.loads(got.text), SCHEMA)


@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_turn_frees_what_the_form_may_do_without(kit, merged, mode):
    engine = kit.engine(merged)
    asked = {"prompt_ids": (5, 6), "max_tokens": 20, "mode": mode, "logit_bias": {0: 90.0}}
    got = engine.generate(Request(constraint=Constraint.regex("ok(ok)*"), **asked))
    assert (got.text, got.finish_reason) == ("ok", "stop")


def test_a_grammar_with_a_control_token_keeps_it_and_the_json_around_it(kit, merged):
    engine = kit.engine(merged)
    call = {"type": "object", "properties": {"name": {"enum": ["add", "é"]}}, "required": ["name"]}
    grammar = f'start: (<[2]> "\\n" body)+\nbody: %json {json.dumps(call | {"additionalProperties": False})}\n'
    constraint = Constraint(kind="lark", text=grammar)
    request = Request(prompt_ids=(5, 6), max_tokens=90, temperature=1.0, constraint=constraint, seed=1)
    got = engine.generate(request)
    assert got.token_ids[0] == 2
    if got.finish_reason == "stop":
        call, _ = json.JSONDecoder().raw_decode(got.text.strip())
        assert call["name"] in ("add", "é")
