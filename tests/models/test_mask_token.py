"""The mask token takes a row that nothing else uses, and starts at a token's norm."""

import dataclasses

import pytest
import tokenizers
import torch
from tokenizers import AddedToken
from tokenizers.models import WordLevel

from ar2diff.errors import ModelError
from ar2diff.models.loading import load_model, save_model
from ar2diff.models.mask_token import (
    FAMILY_MASK_IDS,
    RESERVED_TEXTS,
    MaskToken,
    add_mask_token,
    choose_mask_token,
    grow_vocabulary,
    init_mask_embedding,
)
from ar2diff.testing.models import MASK_ID, tiny_config, tiny_diffusion, tiny_model
from ar2diff.tokenizer import Tokenizer


def tokenizer_with(*special, plain=("a", "b"), template=None):
    """Plain tokens first, then `special`; the last special token ends a turn."""
    vocabulary = {text: idx for idx, text in enumerate(plain)}
    backend = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="a"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return Tokenizer(backend, eos_token_ids=[backend.token_to_id(special[-1])], chat_template=template)


def choose(tokenizer, hf_config=None, **overrides):
    return choose_mask_token(tokenizer, tiny_config(**overrides), hf_config or {})


@pytest.mark.parametrize("text", RESERVED_TEXTS)
def test_a_reserved_token_is_taken(text):
    expected = MaskToken(id=2, text=text, is_new_row=False)
    assert choose(tokenizer_with(text, "<end>"), vocab_size=4) == expected


def test_reserved_tokens_are_taken_in_the_tables_order():
    assert choose(tokenizer_with("<unused0>", "<mask>", "<end>")).text == "<mask>"


@pytest.mark.parametrize(
    ("tokenizer", "hf_config"),
    [
        (tokenizer_with("<end>", "<mask>"), {}),
        (tokenizer_with("<mask>", "<end>"), {"eos_token_id": [2]}),
        (tokenizer_with("<mask>", "<end>"), {"pad_token_id": 2}),
        (tokenizer_with("<mask>", "<end>"), {"bos_token_id": 2}),
        (tokenizer_with("<mask>", "<end>", template="{{ messages }}<mask>"), {}),
        (tokenizer_with("<x>", "<end>", plain=("a", "<mask>")), {}),
    ],
)
def test_a_token_in_use_is_never_taken(tokenizer, hf_config):
    assert choose(tokenizer, hf_config, vocab_size=10).id == tokenizer.max_token_id + 1


def test_without_a_reserved_token_a_padded_row_is_taken_and_else_a_new_one():
    tokenizer = tokenizer_with("<x>", "<end>")
    assert choose(tokenizer, vocab_size=8) == MaskToken(id=4, text="<|MASK|>", is_new_row=False)
    assert choose(tokenizer, vocab_size=4) == MaskToken(id=4, text="<|MASK|>", is_new_row=True)


@pytest.mark.parametrize("family", FAMILY_MASK_IDS)
def test_a_familys_published_row_is_taken_while_it_is_free(family):
    idx = FAMILY_MASK_IDS[family]
    tokenizer = tokenizer_with("<mask>", "<end>")
    expected = MaskToken(id=idx, text="<|MASK|>", is_new_row=False)
    assert choose(tokenizer, model_type=family, vocab_size=151936) == expected
    assert choose(tokenizer, model_type=family, vocab_size=idx).id == 2
    full = tokenizer_with("<mask>", "<end>", plain=[f"t{n}" for n in range(idx + 1)])
    assert choose(full, model_type=family, vocab_size=151936).id == idx + 1


def real_norms(decoder, mask_id, count):
    return torch.stack([decoder.embedding.weight[i].norm() for i in range(count) if i != mask_id]).detach()


@pytest.mark.parametrize("num_real_rows", [260, 200])
def test_the_mask_row_points_to_the_mean_of_the_real_rows_at_their_median_norm(num_real_rows):
    decoder = tiny_model(0, tied_head=False).decoder
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    init_mask_embedding(decoder, MASK_ID, num_real_rows=num_real_rows)
    row = decoder.embedding.weight[MASK_ID].detach()
    rows = before["embedding.weight"][[i for i in range(num_real_rows) if i != MASK_ID]]
    torch.testing.assert_close(row.norm(), real_norms(decoder, MASK_ID, num_real_rows).median())
    torch.testing.assert_close(torch.nn.functional.cosine_similarity(row, rows.mean(0), dim=0), torch.tensor(1.0))
    for name, tensor in decoder.state_dict().items():
        if name == "embedding.weight":
            others = torch.arange(260) != MASK_ID
            assert torch.equal(tensor[others], before[name][others])
        else:
            assert torch.equal(tensor, before[name])


def test_without_rescaling_the_row_is_the_plain_mean():
    decoder = tiny_model(0).decoder
    rows = decoder.embedding.weight.detach().clone()
    init_mask_embedding(decoder, MASK_ID, num_real_rows=260, rescale=False)
    keep = torch.arange(260) != MASK_ID
    torch.testing.assert_close(decoder.embedding.weight[MASK_ID].detach(), rows[keep].mean(0))


@pytest.mark.parametrize("mask_id", [-1, 260])
def test_a_row_that_is_not_there_is_refused(mask_id):
    with pytest.raises(ModelError, match="no embedding row"):
        init_mask_embedding(tiny_model(0).decoder, mask_id, num_real_rows=260)


def test_a_mean_without_direction_is_refused():
    decoder = tiny_model(0).decoder
    decoder.embedding.weight.data.zero_()
    with pytest.raises(ModelError, match="mean of the embedding rows is zero"):
        init_mask_embedding(decoder, 0, num_real_rows=260)


@pytest.mark.parametrize("tied", [True, False])
def test_growing_keeps_every_old_row_and_logit(tied):
    model = tiny_model(0, tied_head=tied)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    old_rows, old_logits = model.decoder.embedding.weight.detach().clone(), model.decoder.logits(hidden).detach()
    grow_vocabulary(model.decoder, dataclasses.replace(model.config, vocab_size=263))
    assert model.decoder.embedding.weight.shape == (263, 32)
    assert torch.equal(model.decoder.embedding.weight[:260], old_rows)
    assert torch.equal(model.decoder.logits(hidden)[:, :260], old_logits)
    assert model.decoder.logits(hidden).shape == (3, 263)
    assert model.decoder.embedding.weight.requires_grad


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_a_new_mask_row_saves_and_loads(tied, tmp_path):
    parent = tiny_model(0, tied_head=tied)
    full = Tokenizer(parent.tokenizer._backend, eos_token_ids=[257], chat_template="<|mask|>")
    model, token = add_mask_token(dataclasses.replace(parent, tokenizer=full))
    assert token == MaskToken(id=260, text="<|MASK|>", is_new_row=True)
    assert model.config.vocab_size == model.hf_config["vocab_size"] == 261
    root = save_model(tmp_path, model, tiny_diffusion(mask_token_id=token.id))
    again = load_model(tmp_path)
    assert again.tensor_root == root
    assert again.config == model.config
    assert torch.equal(again.decoder.embedding.weight[260], model.decoder.embedding.weight[260])


def test_a_reserved_row_needs_no_growth():
    parent = tiny_model(0)
    model, token = add_mask_token(parent)
    assert token == MaskToken(id=MASK_ID, text="<|mask|>", is_new_row=False)
    assert (model.config, model.hf_config) == (parent.config, parent.hf_config)
