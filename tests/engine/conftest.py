"""Tiny random models that talk in bytes."""

from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.models.config import DecoderConfig, DiffusionConfig
from ar2diff.models.decoder import Decoder
from ar2diff.tokenizer import Tokenizer

END, MASK, PAD, WIDE = 256, 257, 258, 259  # WIDE is one token for a whole word


def build_byte_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = dict(enumerate(_byte_letters()))
    assert sorted(by_byte.values()) == letters
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: idx for idx, letter in by_byte.items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True) for text in ("<|im_end|>", "<mask>", "<pad>")]
    )
    backend.add_tokens([tokenizers.AddedToken("oSTOPx", special=False)])
    return Tokenizer(backend, eos_token_ids=[END], chat_template=None)


def _byte_letters():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = [], 0
    for byte in range(256):
        letters.append(chr(byte) if byte in plain else chr(256 + extra))
        extra += byte not in plain
    return letters


TOKENIZER = build_byte_tokenizer()


def build_loaded(*, shift=True, clean="causal", block_size=4, seed=0, max_seq_len=64, converted=True, sharp=1.0):
    """A random model; `sharp` scales its logits, so that confidences differ."""
    torch.manual_seed(seed)
    config = DecoderConfig(
        model_type="llama",
        vocab_size=262,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_seq_len=max_seq_len,
        norm_eps=1e-5,
        rope_theta=10000.0,
    )
    decoder = Decoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
        decoder.head.weight *= sharp
        decoder.head.weight[END] *= 1.2
    diffusion = DiffusionConfig(
        block_size=block_size,
        trained_block_sizes=tuple(sorted({1, 2, 4, 8, block_size})),
        shift_logits=shift,
        mask_token_id=MASK,
        clean_attention=clean,
    )
    return SimpleNamespace(
        decoder=decoder,
        config=config,
        tokenizer=TOKENIZER,
        diffusion=diffusion if converted else None,
    )


class Script:
    """Replaces a model's logits by what each position must say: row of position p says `after[p + 1]` (shifted).

    Positions count from the start of the prompt; unnamed ones say "a". `confidence[p]` orders the reveals.
    """

    def __init__(self, loaded, tokens, *, confidence=None):
        self.shift = int(loaded.diffusion is None or loaded.diffusion.shift_logits)
        self.tokens, self.confidence = tokens, confidence or {}

    def attach(self, engine):
        runner, state = engine.runner, {}
        original = type(runner).forward

        def forward(ids, positions, attend, gate=None):
            hidden = original(runner, ids, positions, attend, gate)
            state["rows"] = hidden
            return torch.cat((hidden, positions[:, None].to(hidden)), dim=1)

        def logits(hidden):
            out = torch.zeros(hidden.shape[0], runner.config.vocab_size)
            for row, position in enumerate(hidden[:, -1].long().tolist()):
                place = position + self.shift
                out[row, self.tokens.get(place, ord("a"))] = self.confidence.get(place, 12.0)
            return out

        runner.forward, runner.logits = forward, logits
        return engine


def build_engine(loaded, **config):
    return Engine(loaded, clock=SystemClock(), config=EngineConfig(**config))


@pytest.fixture(scope="session")
def kit():
    return SimpleNamespace(
        loaded=build_loaded,
        engine=build_engine,
        script=Script,
        tokenizer=TOKENIZER,
        END=END,
        MASK=MASK,
        PAD=PAD,
        WIDE=WIDE,
    )


@pytest.fixture(scope="session")
def library_dir(tmp_path_factory):
    """Where compiled code is kept, so that it is built once for all tests."""
    return tmp_path_factory.mktemp("native")
