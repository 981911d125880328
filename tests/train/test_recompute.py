"""Less memory, the same numbers: what the backward pass computes again changes neither losses nor gradients."""

import pytest
import torch
from test_adapter_training import adapted, batch_of, build_row

from ar2diff.errors import ConfigError
from ar2diff.models.adapters import AdapterConfig
from ar2diff.testing.models import MASK_ID, tiny_model
from ar2diff.train.config import TrainConfig
from ar2diff.train.objective import ObjectiveConfig
from ar2diff.train.recompute import compile_layers, set_recompute
from ar2diff.train.step import accumulate_gradients


def gradients(loaded, parameters):
    losses = accumulate_gradients(
        loaded.decoder,
        [batch_of(build_row(), with_causal=loaded.decoder.adapter is None)],
        ar_weight=0.5 if loaded.decoder.adapter is None else 0.0,
        mask_token_id=MASK_ID,
        precision="fp32",
    )
    return losses, {name: parameter.grad.clone() for name, parameter in parameters.items()}


def build(with_adapter):
    if with_adapter:
        loaded, adapter = adapted()
        return loaded, adapter.parameters()
    loaded = tiny_model(0)
    return loaded, dict(loaded.decoder.layers.named_parameters())


def kept_numbers(recompute, with_adapter):
    """How many numbers one forward pass keeps for its backward pass, weights aside."""
    loaded, _ = build(with_adapter)
    set_recompute(loaded.decoder, recompute)
    weights = {weight.data_ptr() for weight in loaded.decoder.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    from ar2diff.train.forward import forward_states

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward_states(loaded.decoder, batch_of(build_row()))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) // 4


@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("recompute", ["mlp", "layer"])
def test_losses_and_gradients_are_the_same_bit_for_bit(recompute, with_adapter):
    plain = gradients(*build(with_adapter))
    loaded, parameters = build(with_adapter)
    set_recompute(loaded.decoder, recompute)
    losses, grads = gradients(loaded, parameters)
    assert losses == plain[0]
    assert all(torch.equal(grads[name], grad) for name, grad in plain[1].items())


@pytest.mark.parametrize("with_adapter", [False, True])
def test_each_level_keeps_less_than_the_one_before(with_adapter):
    none, mlp, layer = (kept_numbers(level, with_adapter) for level in ("none", "mlp", "layer"))
    assert layer < mlp < none


def test_a_level_that_is_taken_back_keeps_all_again():
    loaded, _ = build(with_adapter=False)
    set_recompute(loaded.decoder, "layer")
    set_recompute(loaded.decoder, "none")
    assert all(layer.rerun is None and layer.mlp.rerun is None for layer in loaded.decoder.layers)


# The tracer looks at `.grad` of inner tensors and makes autograd functions.
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*should not be instantiated")
def test_compiled_layers_compute_the_same():
    # The tracer without its code generator: what is compiled, not how fast it is.
    torch.compiler.reset()
    plain = gradients(*build(with_adapter=False))
    loaded, parameters = build(with_adapter=False)
    compile_layers(loaded.decoder, backend="aot_eager")
    losses, grads = gradients(loaded, parameters)
    assert losses.diffusion == pytest.approx(plain[0].diffusion, rel=1e-5)
    for name, grad in plain[1].items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_compiled_layers_and_an_adapter_are_refused_together():
    objective = ObjectiveConfig(ar_weight=0.0)
    TrainConfig(steps=1, objective=objective, adapter=AdapterConfig(rank=2))
    with pytest.raises(ConfigError, match="compiled"):
        TrainConfig(steps=1, objective=objective, compiled=True, adapter=AdapterConfig(rank=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_layers_compute_the_same_on_a_gpu():
    torch.compiler.reset()
    loaded, parameters = build(with_adapter=False)
    loaded.decoder.to("cuda")
    losses, plain = gradients(loaded, parameters)
    loaded.decoder.zero_grad()
    compile_layers(loaded.decoder)
    again, grads = gradients(loaded, parameters)
    assert again.diffusion == pytest.approx(losses.diffusion, rel=1e-4)
    for name, grad in plain.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-5, msg=name)
