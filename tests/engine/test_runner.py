"""The lean forward equals the decoder it was built from."""

import pytest
import torch

from ar2diff.attention.ops import causal_attend
from ar2diff.engine.runner import Runner
from ar2diff.models.config import DecoderConfig, RopeScaling
from ar2diff.models.decoder import Decoder

BASE = {
    "model_type": "tiny",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_seq_len": 64,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
SWITCHES = {
    "plain": {},
    "tied": {"tied_head": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "post": {"norm_placement": "post", "qk_norm": "flat"},
    "sandwich": {"norm_placement": "sandwich", "norm_offset": 1.0, "qk_norm": "head", "embedding_scale": 5.5},
    "scales": {"residual_scale": 0.3, "logit_scale": 0.2, "attention_scale": 0.4, "activation": "gelu_tanh"},
    "some layers without positions": {"rope_layers": (True, False)},
    "llama 3 positions": {
        "rope_scaling": RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32)
    },
}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_runner_equals_the_decoder_for_every_switch(name, dtype):
    torch.manual_seed(3)
    decoder = Decoder(DecoderConfig(**{**BASE, **SWITCHES[name]}))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    decoder = decoder.to(dtype)
    ids, positions = torch.randint(0, 64, (1, 9)), torch.arange(3, 12)[None]
    with torch.inference_mode():
        attend = causal_attend(decoder.config.softmax_scale)
        wanted = decoder.logits(decoder(ids, positions, attend)).float()[0]
        runner = Runner(decoder)
        runner.reserve(12)
        got = runner.logits(runner(ids[0], positions[0], attend))
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
