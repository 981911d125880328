"""Ids at the edges of a vocabulary: those in gaps stand for nothing, those behind a gap are tokens as others."""

from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from ar2diff.clock import SystemClock
from ar2diff.engine.engine import Engine
from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request
from ar2diff.testing.models import always_model, tiny_diffusion
from ar2diff.tokenizer import Tokenizer

GAP, LAST, BEYOND, END, MASK = 4, 9, 10, 8, 6
VOCABULARY = {"a": 0, "b": 1, "c": 2, "d": 3, "f": 5, "g": LAST}  # without 4 and 7


def build_gap_tokenizer():
    letters = {"a": 0, "b": 1, "c": 2, "d": 3, "f": 5, "<mask>": MASK, "<end>": END, "g": LAST}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<mask>", "<end>")])
    return Tokenizer(backend, eos_token_ids=[END], chat_template=None)


def build_model(token_id):
    """A model of twelve ids that always says one of them."""
    diffusion = tiny_diffusion(mask_token_id=MASK)
    loaded = always_model(token_id, diffusion=diffusion, vocab_size=12)
    return SimpleNamespace(
        decoder=loaded.decoder, config=loaded.config, tokenizer=build_gap_tokenizer(), diffusion=diffusion
    )


def test_unknown_ids_are_those_in_gaps_and_beyond_the_last():
    tokenizer = build_gap_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.max_token_id) == (8, LAST)
    assert tokenizer.list_unknown(12) == [GAP, 7, 10, 11]
    assert tokenizer.list_unknown(6) == [GAP]


@pytest.mark.parametrize("mode", ["ar", "diffusion", "verified"])
@pytest.mark.parametrize("token_id", [GAP, 7, BEYOND, 11, LAST, 5, MASK, END])
def test_exactly_the_ids_without_a_token_and_mask_are_never_emitted(token_id, mode):
    loaded = build_model(token_id)
    request = Request(prompt_ids=(0, 1), max_tokens=6, mode=mode)
    got = Engine(loaded, clock=SystemClock()).generate(request)
    assert got.token_ids == generate_reference(loaded, request).token_ids
    if token_id in (LAST, 5):
        assert got.token_ids == (token_id,) * 6
    elif token_id == END:
        assert (got.token_ids, got.finish_reason) == ((), "stop")
    else:
        assert token_id not in got.token_ids


@pytest.mark.parametrize("mode", ["ar", "diffusion", "verified"])
def test_sampling_at_any_temperature_and_bias_keeps_out_of_the_gaps(mode):
    loaded = build_model(GAP)
    engine = Engine(loaded, clock=SystemClock())
    bias = {GAP: 100.0, MASK: 100.0, BEYOND: 100.0, END: -100.0}
    for seed in range(4):
        asked = {"temperature": 2.0, "seed": seed, "logit_bias": bias, "top_logprobs": 20}
        got = engine.generate(Request(prompt_ids=(0, 1), max_tokens=12, mode=mode, **asked))
        assert len(got.token_ids) == 12
        assert set(got.token_ids) <= set(VOCABULARY.values())
        shown = {token_id for row in got.top_logprobs for token_id, _ in row}
        assert shown <= {*VOCABULARY.values(), END}
        assert torch.isfinite(torch.tensor(got.logprobs)).all()
