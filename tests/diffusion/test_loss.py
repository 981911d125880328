"""The chunked loss equals the plain one, in bounded memory."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ar2diff.diffusion.corrupt import cut_response
from ar2diff.diffusion.likelihood import bits_per_token, draw_bound_noise
from ar2diff.diffusion.loss import chunked_cross_entropy
from ar2diff.seeding import keyed_generator


def _inputs(num_positions=37, hidden=8, vocab=29):
    torch.manual_seed(0)
    hidden_states = torch.randn(num_positions, hidden, requires_grad=True)
    head = torch.randn(vocab, hidden, requires_grad=True)
    return hidden_states, head, torch.randint(0, vocab - 1, (num_positions,)), torch.rand(num_positions)


@pytest.mark.parametrize("chunk_size", [1, 5, 37, 100])
@pytest.mark.parametrize("logit_scale", [1.0, 0.25])
def test_loss_and_gradients_equal_plain_cross_entropy_with_the_mask_token_banned(chunk_size, logit_scale):
    hidden, head, targets, weights = _inputs()
    logits = (hidden @ head.t()) * logit_scale
    banned = torch.zeros_like(logits).index_fill(1, torch.tensor([28]), float("-inf"))
    expected = F.cross_entropy(logits + banned, targets, reduction="none")
    expected_grads = torch.autograd.grad((expected * weights).sum() * 3, (hidden, head))
    loss, nll = chunked_cross_entropy(
        hidden, head, targets, weights, mask_token_id=28, logit_scale=logit_scale, chunk_size=chunk_size
    )
    torch.testing.assert_close(nll, expected.detach())
    torch.testing.assert_close(loss, (expected * weights).sum())
    for actual, wanted in zip(torch.autograd.grad(loss * 3, (hidden, head)), expected_grads, strict=True):
        torch.testing.assert_close(actual, wanted)
    assert not expected_grads[1][28].any()


class _LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_tensor_grows_with_positions_times_vocabulary():
    hidden, head, targets, weights = _inputs(num_positions=512, vocab=300)
    with _LargestTensor() as largest:
        chunked_cross_entropy(hidden, head, targets, weights, mask_token_id=0, chunk_size=16)[0].backward()
    assert largest.numel <= 16 * 300


def test_a_frozen_head_gets_no_gradient():
    hidden, head, targets, weights = _inputs()
    head.requires_grad_(False)
    chunked_cross_entropy(hidden, head, targets, weights, mask_token_id=28)[0].backward()
    assert head.grad is None
    assert hidden.grad is not None


def test_the_bound_weights_every_token_equally_in_expectation():
    supervised = cut_response(np.arange(30), 3, block_size=8, end_token_id=0, shift_logits=True).supervised_NS
    total = np.zeros(supervised.shape)
    for draw in range(3000):
        noise = draw_bound_noise(supervised, shift_logits=True, generator=keyed_generator("bound", draw))
        total += (noise.masked_NKS * noise.weight_NK[:, :, None]).sum(axis=1) * supervised
    assert total[supervised] / 3000 == pytest.approx(1.0, abs=0.12)


def test_a_block_with_one_unknown_token_is_scored_exactly():
    noise = draw_bound_noise(np.ones((5, 1), dtype=bool), shift_logits=False, generator=keyed_generator("x"))
    assert noise.masked_NKS.all()
    assert (noise.weight_NK == 1).all()
    assert bits_per_token(float(np.log(2.0)) * 6, 3) == pytest.approx(2.0)
