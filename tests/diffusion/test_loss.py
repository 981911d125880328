"""The chunked loss equals the plain one, in bounded memory."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ar2diff.diffusion.corrupt import cut_response
from ar2diff.diffusion.likelihood import bits_per_token, draw_bound_noise
from ar2diff.diffusion.loss import Teacher, chunked_cross_entropy, chunked_losses
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


def _teacher(top_k, vocab=29, num_positions=37):
    torch.manual_seed(1)
    return Teacher(
        hidden_PE=torch.randn(num_positions, 6),
        head_VE=torch.randn(vocab, 6),
        weights_P=torch.rand(num_positions),
        top_k=top_k,
    )


def _dense_divergence(student_logits, teacher_logits, top_k):
    # Forward KL between the two distributions after all but the teacher's top k tokens are merged.
    p, q = teacher_logits.double().softmax(-1), student_logits.double().softmax(-1)
    rows = []
    for one_p, one_q in zip(p, q, strict=True):
        kept = one_p.argsort(descending=True)[:top_k]
        pairs = [(one_p[idx], one_q[idx]) for idx in kept]
        others = [idx for idx in range(len(one_p)) if idx not in set(kept.tolist())]
        pairs.append((one_p[others].sum(), one_q[others].sum()))
        rows.append(sum(a * (a / b).log() for a, b in pairs if a > 0))
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 4, None])
@pytest.mark.parametrize("logit_scale", [1.0, 0.5])
def test_distillation_is_the_forward_divergence_over_the_teachers_tokens_and_the_rest(top_k, logit_scale):
    hidden, head, targets, weights = _inputs()
    teacher = _teacher(top_k)
    banned = torch.zeros(29).index_fill(0, torch.tensor([28]), -torch.inf)
    student_logits = (hidden @ head.t()) * logit_scale + banned
    teacher_logits = (teacher.hidden_PE @ teacher.head_VE.t()) * logit_scale + banned
    divergence = _dense_divergence(student_logits, teacher_logits, 28 if top_k is None else top_k)
    nll = F.cross_entropy(student_logits, targets, reduction="none")
    expected = (divergence * teacher.weights_P).sum() + (nll * weights).sum()
    grads = torch.autograd.grad(expected * 2, (hidden, head))
    losses = chunked_losses(
        hidden, head, targets, weights, mask_token_id=28, teacher=teacher, logit_scale=logit_scale, chunk_size=5
    )
    torch.testing.assert_close(losses.kl_P, divergence.detach().float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses.loss, expected.float(), rtol=1e-4, atol=1e-4)
    for actual, wanted in zip(torch.autograd.grad(losses.loss * 2, (hidden, head)), grads, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_a_student_that_equals_its_teacher_has_nothing_to_learn_from_it():
    hidden, head, targets, _ = _inputs()
    teacher = Teacher(hidden_PE=hidden.detach(), head_VE=head.detach(), weights_P=torch.ones(37), top_k=4)
    losses = chunked_losses(hidden, head, targets, torch.zeros(37), mask_token_id=28, teacher=teacher)
    losses.loss.backward()
    assert losses.kl_P.abs().max() < 1e-5
    assert hidden.grad.abs().max() < 1e-5


def test_a_hopeless_student_gets_a_finite_divergence_and_gradient():
    hidden, head, targets, weights = _inputs()
    losses = chunked_losses(hidden * 1e4, head, targets, weights, mask_token_id=28, teacher=_teacher(3))
    losses.loss.backward()
    assert losses.kl_P.isfinite().all()
    assert hidden.grad.isfinite().all()
