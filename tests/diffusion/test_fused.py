"""The fused loss is the chunked one: the mask token out of the sum, a weight for each token, gradients unfiltered."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from ar2diff.diffusion import fused
from ar2diff.diffusion.fused import fused_losses, refuse_fused
from ar2diff.diffusion.loss import chunked_losses

MASK = 3


def kernel(e, c, targets, *, reduction, filter_eps):
    """What the library's function promises for these arguments, written out."""
    assert (reduction, filter_eps) == ("none", None)
    return F.cross_entropy((e @ c.t()).float(), targets, reduction="none")


def inputs(device="cpu", vocab=50, size=16):
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(rows, size, generator=generator) for rows in (20, vocab))
    targets = torch.randint(4, vocab, (20,), generator=generator)
    weights = torch.rand(20, generator=generator)
    return [tensor.to(device) for tensor in (hidden, head, targets, weights)]


def losses_and_gradients(function, hidden, head, targets, weights, **settings):
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    losses = function(hidden, head, targets, weights, mask_token_id=MASK, **settings)
    losses.loss.backward()
    return losses.loss.detach(), losses.nll_P, hidden.grad, head.grad


@pytest.mark.parametrize("logit_scale", [1.0, 0.25])
def test_the_fused_loss_and_its_gradients_are_the_chunked_ones(monkeypatch, logit_scale):
    monkeypatch.setitem(sys.modules, fused.LIBRARY, SimpleNamespace(linear_cross_entropy=kernel))
    ours = losses_and_gradients(fused_losses, *inputs(), logit_scale=logit_scale)
    theirs = losses_and_gradients(chunked_losses, *inputs(), logit_scale=logit_scale, chunk_size=7)
    for fast, slow in zip(ours, theirs, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


def test_where_it_cannot_be_used_the_reason_is_named(monkeypatch):
    assert "not on cpu" in refuse_fused(torch.device("cpu"), "bf16")
    assert "fp32" in refuse_fused(torch.device("cuda"), "fp32")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    assert "ar2diff[gpu]" in refuse_fused(torch.device("cuda"), "bf16")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: object())
    assert refuse_fused(torch.device("cuda"), "bf16") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_librarys_kernel_equals_the_chunks_on_a_gpu():
    pytest.importorskip(fused.LIBRARY)
    given = inputs("cuda", vocab=5000, size=128)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours, theirs = (losses_and_gradients(function, *given) for function in (fused_losses, chunked_losses))
    for fast, slow in zip(ours, theirs, strict=True):
        torch.testing.assert_close(fast.float(), slow.float(), rtol=2e-2, atol=2e-2)
