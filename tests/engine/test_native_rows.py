"""Native forward passes: products are exact, rows do not depend on each other, masks are honoured."""

import native_kit as kit
import pytest
import torch

from ar2diff.engine.native.pack import pack_matrix, unpack_matrix
from ar2diff.models.config import RopeScaling


@pytest.fixture
def runner(library_dir):
    return kit.build_runner(kit.build_decoder(), library_dir, num_threads=2)


IDS = torch.randint(0, 75, (70,), generator=torch.Generator().manual_seed(1))


def draw_exact(rows, columns, seed):
    """Integers whose every group of 32 holds a 127, so that quantisation with scale 1 changes nothing."""
    values = torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()
    values[:, ::32] = 127.0
    return values


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 33), (32, 32), (45, 70), (130, 96)])
def test_products_of_integers_are_exact_for_every_row_count(library_dir, outputs, inputs):
    weight, x = draw_exact(outputs, inputs, 2), draw_exact(70, inputs, 3)
    wanted = (x.long() @ weight.long().T).float()
    for count in range(1, 71):
        assert torch.equal(kit.multiply(library_dir, weight, x[:count]), wanted[:count])


def test_the_portable_product_is_the_same_bits(library_dir):
    weight, x = torch.randn(45, 70), torch.randn(9, 70)
    fast = kit.multiply(library_dir, weight, x)
    assert torch.equal(fast, kit.multiply(library_dir, weight, x, portable=True))
    torch.testing.assert_close(fast, x @ weight.T, atol=0.3, rtol=0.0)


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1), (0, 1), (0, 0)])
def test_sums_of_the_largest_products_are_exact(library_dir, signs):
    """All bytes are 127, so a group's sum is the largest there is; 0 draws the signs."""
    draw = torch.Generator().manual_seed(4)
    weight, x = (
        127.0 * (sign if sign else torch.randint(0, 2, shape, generator=draw) * 2 - 1) * torch.ones(shape)
        for sign, shape in zip(signs, ((37, 96), (9, 96)), strict=True)
    )
    wanted = (x.long() @ weight.long().T).float()
    for is_portable in (False, True):
        for count in (1, 2, 3, 4, 5, 9):
            assert torch.equal(kit.multiply(library_dir, weight, x[:count], portable=is_portable), wanted[:count])


@pytest.mark.parametrize("seed", range(6))
def test_every_form_of_the_product_gives_the_same_bits_at_any_shape(library_dir, seed):
    """Real numbers of very different sizes: groups of zeros, tiny and huge values, odd sizes."""
    draw = torch.Generator().manual_seed(seed)
    outputs, inputs, rows = (int(torch.randint(1, most, (), generator=draw)) for most in (100, 200, 14))
    weight = torch.randn(outputs, inputs, generator=draw) * 10.0 ** torch.randint(-6, 6, (inputs,), generator=draw)
    x = torch.randn(rows, inputs, generator=draw) * 10.0 ** torch.randint(-6, 6, (rows, 1), generator=draw)
    x[:, inputs // 2 :] *= torch.randint(0, 2, (rows, 1), generator=draw)
    whole = kit.multiply(library_dir, weight, x)
    assert torch.equal(whole, kit.multiply(library_dir, weight, x, portable=True))
    for row in range(rows):
        assert torch.equal(kit.multiply(library_dir, weight, x[row : row + 1]), whole[row : row + 1])


def test_packed_weights_unpack_to_within_half_a_step():
    weight = torch.randn(45, 70)
    back = unpack_matrix(pack_matrix(weight), 45, 70)
    assert (back - weight).abs().max() <= weight.abs().max() / 127 * 0.51
    assert torch.equal(unpack_matrix(pack_matrix(back), 45, 70), back) or (back - weight).abs().max() < 0.02


def test_prefill_in_chunks_of_any_size_is_token_by_token_bit_for_bit(runner):
    wanted = kit.run_chunks(runner, IDS, [1] * 70)
    for sizes in ([70], [69, 1], [1, 69], [8] * 8 + [6], [17, 16, 37], [33, 37]):
        assert torch.equal(kit.run_chunks(runner, IDS, sizes), wanted)


def test_a_row_does_not_depend_on_rows_it_does_not_see(runner):
    """Ten causal rows, then any number of rows that the first ten do not see."""
    wanted = kit.run_chunks(runner, IDS[:30], [20, 10])[20:]
    logits = runner.logits(wanted)
    for extra in (1, 5, 6, 7, 23, 40):
        cache = kit.build_cache(runner.config)
        runner(IDS[:20], torch.arange(20), cache.attend_with(kit.causal_mask(20)))
        cache.commit(20)
        mask = torch.ones(10 + extra, 10 + extra, dtype=torch.bool)
        mask[:10] = False
        mask[:10, :10] = kit.causal_mask(10)
        ids = torch.cat((IDS[20:30], IDS[:extra].flip(0)))
        hidden = runner(ids, torch.arange(20, 30 + extra), cache.attend_with(mask))
        assert torch.equal(hidden[:10], wanted)
        assert torch.equal(runner.logits(hidden)[:10], logits)
        assert torch.equal(runner.logits(hidden[3:4]), logits[3:4])


def test_a_block_sees_itself_and_a_causal_row_does_not_see_ahead(runner):
    changed = IDS[:8].clone()
    changed[7] = (changed[7] + 1) % 75

    def run(ids, mask):
        return runner(ids, torch.arange(8), kit.build_cache(runner.config).attend_with(mask))

    causal = kit.causal_mask(8)
    assert torch.equal(run(IDS[:8], causal)[:7], run(changed, causal)[:7])
    both_ways = run(IDS[:8], None)
    assert (both_ways[:7] != run(changed, None)[:7]).any(dim=1).all()
    assert torch.equal(both_ways, run(IDS[:8], torch.ones(8, 8, dtype=torch.bool)))


def test_uncommitted_rows_leave_no_trace(runner):
    wanted = kit.run_chunks(runner, IDS[:12], [8, 4])
    cache = kit.build_cache(runner.config)
    first = runner(IDS[:8], torch.arange(8), cache.attend_with(kit.causal_mask(8)))
    cache.commit(8)
    runner(IDS[40:60], torch.arange(8, 28), cache.attend_with(None))
    last = runner(IDS[8:12], torch.arange(8, 12), cache.attend_with(kit.causal_mask(4)))
    assert torch.equal(torch.cat((first, last)), wanted)


SWITCHES = {
    "plain": {},
    "tied, small heads": {"tied_head": True, "head_dim": 6},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "head norms": {"qk_norm": "head", "norm_offset": 1.0, "embedding_scale": 5.5, "head_dim": 20},
    "scales": {"residual_scale": 0.3, "logit_scale": 0.2, "attention_scale": 0.4, "activation": "gelu_tanh"},
    "gelu, wide heads": {"activation": "gelu", "head_dim": 72},
    "some layers without positions": {"rope_layers": (True, False)},
    "llama 3 positions": {
        "rope_scaling": RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32)
    },
}


@pytest.mark.parametrize("name", SWITCHES)
def test_threads_and_instructions_do_not_change_a_bit_and_numbers_are_the_decoders(library_dir, name):
    decoder = kit.build_decoder(**SWITCHES[name])
    one, two, portable = (
        kit.build_runner(decoder, library_dir, num_threads=threads, portable=is_portable)
        for threads, is_portable in ((1, False), (2, False), (2, True))
    )
    hidden = [kit.run_chunks(runner, IDS[:40], [19, 21]) for runner in (one, two, portable)]
    logits = [runner.logits(rows) for runner, rows in zip((one, two, portable), hidden, strict=True)]
    assert torch.equal(hidden[0], hidden[1])
    assert torch.equal(hidden[0], hidden[2])
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    attend = kit.build_cache(decoder.config).attend_with(kit.causal_mask(40))
    wanted = decoder.logits(decoder(IDS[None, :40], torch.arange(40)[None], attend))[0].log_softmax(dim=-1)
    divergence = (wanted.exp() * (wanted - logits[0].log_softmax(dim=-1))).sum(dim=-1)
    assert divergence.max() < 0.02
    assert divergence.mean() < 0.003
