"""The diffusion bound is what a walk through all mask patterns, and through all orders, gives by hand."""

import itertools
import math

import numpy as np
import pytest
import torch

from ar2diff.attention.ops import masked_attend
from ar2diff.data.stream import PackedRow
from ar2diff.diffusion.likelihood import draw_bound_noise
from ar2diff.models.decoder import Decoder
from ar2diff.seeding import derive_seed, keyed_generator
from ar2diff.testing.models import tiny_config, tiny_diffusion
from ar2diff.train.validation import measure_likelihood

# A vocabulary of seven: four words, the end of turn, the mask, and one more.
VOCABULARY, END, MASK = 7, 4, 5
WORDS = [idx for idx in range(VOCABULARY) if idx != MASK]
PROMPT = [0, 3, 1]
ANSWER = [2, 0, 6, 1, 3, END]


def build_decoder():
    decoder = Decoder(tiny_config(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, tied_head=False))
    generator = torch.Generator().manual_seed(derive_seed("enumeration", 0))
    for name, parameter in decoder.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data = 1 + 0.1 * noise if name.endswith("norm.weight") else 1.5 * noise
    return decoder


DECODER = build_decoder()


def build_row(answer, row_id=0):
    ids = [*PROMPT, *answer]
    return PackedRow(
        row_id=row_id,
        token_ids=np.array(ids, dtype=np.int64),
        document_starts=np.array([0], dtype=np.int64),
        document_lens=np.array([len(ids)], dtype=np.int64),
        prompt_lens=np.array([len(PROMPT)], dtype=np.int64),
    )


def measure(answers, *, block_size, shift_logits, clean_attention="causal", seed=0, num_draws=1):
    diffusion = tiny_diffusion(
        block_size=block_size,
        trained_block_sizes=(block_size,),
        mask_token_id=MASK,
        shift_logits=shift_logits,
        clean_attention=clean_attention,
    )
    rows = [build_row(answer, idx) for idx, answer in enumerate(answers)]
    return measure_likelihood(
        DECODER, rows, diffusion, end_token_id=END, block_size=block_size, num_draws=num_draws, seed=seed
    )


def nats(bits, num_tokens):
    return bits * num_tokens * math.log(2.0)


@torch.no_grad()
def log_p(clean, block, *, clean_attention, block_size):
    """Log p of each word at each row of prefix and noisy block, by one forward under a mask written out by hand."""
    ids = [*clean, *block]
    seen = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for row in range(len(clean)):
        seen[row, : row + 1] = True
        if clean_attention == "block" and row >= len(PROMPT):
            first = len(PROMPT) + (row - len(PROMPT)) // block_size * block_size
            seen[row, first : first + block_size] = True
    seen[len(clean) :] = True
    tokens, places = torch.tensor([ids]), torch.arange(len(ids))[None]
    logits = DECODER.logits(DECODER(tokens, places, masked_attend(seen, DECODER.config.softmax_scale))[0]).double()
    logits[:, MASK] = -torch.inf
    return logits.log_softmax(dim=-1)


def bound_by_hand(answer, *, block_size, shift_logits, clean_attention="causal", walk):
    """The bound in nats: `walk` says what a block's unknown places cost, given how a set of masked ones is scored."""
    total = 0.0
    for start in range(0, len(answer), block_size):
        clean, block = [*PROMPT, *answer[:start]], answer[start : start + block_size]
        filler = [MASK] * (block_size - len(block))
        unknown = list(range(len(block)))
        if shift_logits:
            # The block's first token is known from the causal path.
            unknown.remove(0)
            total -= float(log_p(clean, [], clean_attention="causal", block_size=block_size)[-1, block[0]])

        def cost(masked, wanted, clean=clean, block=block, filler=filler):
            shown = [MASK if place in masked else word for place, word in enumerate(block)]
            scores = log_p(clean, shown + filler, clean_attention=clean_attention, block_size=block_size)
            rows = scores[len(clean) - int(shift_logits) :]
            return -sum(float(rows[place, block[place]]) for place in wanted)

        total += walk(unknown, cost) if unknown else 0.0
    return total


def over_patterns(unknown, cost):
    """A number of masks drawn evenly, places drawn evenly, each loss by unknown over masked."""
    size, total = len(unknown), 0.0
    for count in range(1, size + 1):
        patterns = list(itertools.combinations(unknown, count))
        total += sum(size / count * cost(pattern, pattern) for pattern in patterns) / len(patterns) / size
    return total


def over_orders(unknown, cost):
    """Token after token, in every order, all orders alike."""
    orders = list(itertools.permutations(unknown))
    return sum(cost(order[at:], order[at : at + 1]) for order in orders for at in range(len(order))) / len(orders)


KINDS = [
    {"block_size": 4, "shift_logits": True},
    {"block_size": 3, "shift_logits": False},
    {"block_size": 4, "shift_logits": False, "clean_attention": "block"},
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_walks_are_one_number(kind):
    patterns, orders = (bound_by_hand(ANSWER, **kind, walk=walk) for walk in (over_patterns, over_orders))
    assert patterns == pytest.approx(orders, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_measured_bound_is_the_mean_over_all_patterns(kind):
    expected = bound_by_hand(ANSWER, **kind, walk=over_patterns)
    count = 200
    draws = [nats(measure([ANSWER], **kind, seed=seed).bound_bits, len(ANSWER)) for seed in range(count)]
    error = np.std(draws) / math.sqrt(count)
    assert error < 0.1 * expected
    assert abs(np.mean(draws) - expected) < 4 * error


@pytest.mark.parametrize("shift_logits", [True, False])
def test_every_pattern_is_drawn_as_often_as_it_should_be(shift_logits):
    count, size = 40_000, 4
    supervised = np.ones((count, size), dtype=bool)
    if shift_logits:
        supervised[:, 0] = False
    unknown = [place for place in range(size) if supervised[0, place]]
    noise = draw_bound_noise(supervised, shift_logits=shift_logits, generator=keyed_generator("patterns"))
    drawn = noise.masked_NKS[:, 0]
    for masks in range(1, len(unknown) + 1):
        for pattern in itertools.combinations(unknown, masks):
            wanted = np.isin(np.arange(size), pattern)
            found = (drawn == wanted).all(axis=1)
            share = 1 / len(unknown) / math.comb(len(unknown), masks)
            assert found.mean() == pytest.approx(share, abs=5 * math.sqrt(share / count))
            assert set(noise.weight_NK[found, 0]) == {len(unknown) / masks}


EXACT = [{"block_size": 1, "shift_logits": True}, {"block_size": 1, "shift_logits": False}]
# One unknown token beside the anchor leaves nothing to draw either.
EXACT += [{"block_size": 2, "shift_logits": True}]


@pytest.mark.parametrize("kind", EXACT)
def test_where_a_block_has_one_unknown_token_the_bound_is_exact_without_any_draw(kind):
    expected = bound_by_hand(ANSWER, **kind, walk=over_patterns)
    found = [nats(measure([ANSWER], **kind, seed=seed).bound_bits, len(ANSWER)) for seed in (0, 1)]
    assert found == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("kind", EXACT)
def test_an_exact_likelihood_sums_to_one_over_all_answers(kind):
    total = sum_of_likelihoods(kind, length=2)
    assert total == pytest.approx(1.0, rel=1e-4)


def test_a_bound_sums_to_less_than_one_over_all_answers():
    kind = {"block_size": 3, "shift_logits": False}
    pairs = itertools.product(WORDS, repeat=2)
    total = sum(math.exp(-bound_by_hand(list(pair), **kind, walk=over_patterns)) for pair in pairs)
    assert 0.2 < total < 1.0


def sum_of_likelihoods(kind, length):
    pairs = [list(pair) for pair in itertools.product(WORDS, repeat=length)]
    return sum(math.exp(-nats(measure([pair], **kind).bound_bits, length)) for pair in pairs)


def test_at_block_size_one_a_shifted_model_gives_the_causal_likelihood_and_another_kind_its_own():
    shifted, blockwise = (measure([ANSWER], **kind) for kind in EXACT[:2])
    assert shifted.bound_bits == pytest.approx(shifted.ar_bits, rel=1e-6)
    assert blockwise.bound_bits != pytest.approx(blockwise.ar_bits, rel=1e-3)
