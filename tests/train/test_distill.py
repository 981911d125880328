"""What the frozen parent teaches does not depend on how the batch is cut, and is its own head's distribution."""

import pytest
import torch

from ar2diff.data.stream import RowStream
from ar2diff.diffusion.noise import NoiseConfig
from ar2diff.testing.models import END_ID, MASK_ID, tiny_model
from ar2diff.testing.shards import write_tiny_shard
from ar2diff.train.batch import BatchSettings, build_batch, keyed_noise
from ar2diff.train.distill import Distillation, build_teacher, copy_parent
from ar2diff.train.forward import forward_states
from ar2diff.train.step import accumulate_gradients


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    stream = RowStream(write_tiny_shard(tmp_path_factory.mktemp("distill") / "data"), row_len=64, seed=0)
    return [stream.row(idx) for idx in range(4)]


def batch_of(rows):
    settings = BatchSettings(
        block_size=4,
        shift_logits=True,
        clean_attention="causal",
        mask_token_id=MASK_ID,
        end_token_id=END_ID,
        nelbo_weighted=False,
        with_causal=False,
    )
    return build_batch(rows, settings, keyed_noise(NoiseConfig(), shift_logits=True, seed=0, step=0))


def distillation_from(parent):
    return Distillation(weight=0.7, top_k=8, shift_logits=True, parent=parent)


def test_cutting_the_global_batch_otherwise_changes_nothing_of_the_divergence(rows):
    parent = copy_parent(tiny_model(3).decoder, share_embeddings=False)
    results = []
    for micro in (4, 3, 1):
        decoder = tiny_model(2).decoder
        batches = [batch_of(rows[at : at + micro]) for at in range(0, 4, micro)]
        losses = accumulate_gradients(
            decoder,
            batches,
            ar_weight=0.0,
            diffusion_weight=0.0,
            mask_token_id=MASK_ID,
            precision="fp32",
            distillation=distillation_from(parent),
        )
        results.append([torch.tensor(losses.distill), *(p.grad for p in decoder.parameters())])
    assert results[0][0] > 0
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


def test_the_teacher_keeps_its_own_head_where_the_students_is_trained(rows):
    decoder = tiny_model(2).decoder
    parent = copy_parent(decoder, share_embeddings=False)
    before = decoder.head_weight.detach().clone()
    decoder.embedding.weight.data.mul_(1.5)
    batch = batch_of(rows)
    teacher = build_teacher(
        distillation_from(parent), decoder, batch, forward_states(decoder, batch), num_tokens=batch.num_diffusion
    )
    assert torch.equal(teacher.head_VE, before)
    assert not teacher.hidden_PE.requires_grad
    assert float(teacher.weights_P.sum()) == pytest.approx(0.7)
