"""A fault of one request is that request's alone: whoever runs beside it or comes after it is answered as ever."""

import dataclasses
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.constraint import Constraint
from ar2diff.engine.engine import Engine
from ar2diff.engine.graphs import GraphRunner
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError, ConfigError, GenerationError, RequestError
from ar2diff.models.config import DiffusionConfig
from ar2diff.testing.models import END_ID, tiny_diffusion, tiny_model
from ar2diff.tokenizer import Tokenizer

MODES = ["diffusion", "verified", "ar"]
FORMS = [(True, "causal"), (True, "block"), (False, "causal"), (False, "block")]
SPOILED = 200  # a token whose embedding is not a number
GAP_END, GAP_MASK = 8, 6


def build(loaded=None, **config):
    loaded = loaded or tiny_model(1, diffusion=tiny_diffusion())
    return Engine(loaded, clock=SystemClock(), config=EngineConfig(**config))


def ask(start=10, length=5, max_tokens=8, **fields):
    prompt = tuple((start + idx) % 199 for idx in range(length))
    return Request(prompt_ids=prompt, max_tokens=max_tokens, logit_bias={END_ID: -100.0}, **fields)


def run(scheduler, steps=2000):
    """Step until nothing is left or the steps are used up; how each request ended."""
    ends = {}
    for _ in range(steps):
        for key, result in scheduler.step():
            if isinstance(result, Ar2diffError) or result.generation is not None:
                ends[key] = result if isinstance(result, Ar2diffError) else result.generation
        if not scheduler.num_running and not scheduler.num_waiting:
            break
    return ends


def spoil(form=(True, "causal")):
    """A model, and the same with one token whose embedding is not a number."""
    diffusion = tiny_diffusion(shift_logits=form[0], clean_attention=form[1])
    healthy, spoiled = (tiny_model(1, diffusion=diffusion, tied_head=False) for _ in range(2))
    spoiled.decoder.embedding.weight.data[SPOILED] = float("nan")
    return healthy, spoiled


def test_a_constraint_that_does_not_compile_fails_alone_and_frees_its_place():
    engine = build(max_running=2)
    bad = ask(constraint=Constraint.regex("(a"))
    got = engine.generate_many([ask(), bad, ask(50), bad])
    assert [isinstance(answer, RequestError) for answer in got] == [False, True, False, True]
    assert [got[0].token_ids, got[2].token_ids] == [build().generate(ask(start)).token_ids for start in (10, 50)]
    assert engine.pages.num_used == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 2, 7, 13])
@pytest.mark.parametrize("place", [5, 33, 199])
def test_a_cancelled_request_leaves_no_numbers_that_spoil_the_next_user_of_its_memory(form, steps, place):
    healthy, spoiled = spoil(form)
    prompt = list(ask(90, 200).prompt_ids)
    prompt[place] = SPOILED
    engine = build(spoiled, kv_tokens=320, prefill_chunk=16)
    engine.scheduler.add("bad", Request(prompt_ids=tuple(prompt), max_tokens=9))
    for _ in range(steps):
        engine.scheduler.step()
    engine.scheduler.remove("bad")
    assert engine.pages.num_used == 0
    requests = [ask(3, 40), ask(120, 200), ask(3, 40)]
    wanted = [build(healthy).generate(request).token_ids for request in requests]
    assert [answer.token_ids for answer in engine.generate_many(requests)] == wanted


@pytest.mark.parametrize("place", [0, 1])
def test_passes_of_fixed_shapes_read_no_other_requests_numbers(place):
    healthy, spoiled = spoil()
    engines = [build(healthy), build(spoiled)]
    for engine in engines:
        engine.runner = engine.passes._runner = GraphRunner(engine.loaded.decoder)
    requests = [ask(3, 40, mode=mode) for mode in MODES]
    wanted = [answer.token_ids for answer in engines[0].generate_many(requests)]
    prompt = list(ask(90, 60).prompt_ids)
    prompt[place] = SPOILED
    bad = Request(prompt_ids=tuple(prompt), max_tokens=9, mode="ar")
    first, *got, last = engines[1].generate_many([bad, *requests, bad])
    assert isinstance(first, GenerationError)
    assert isinstance(last, GenerationError)
    assert [getattr(answer, "token_ids", answer) for answer in got] == wanted


def test_a_scored_request_beside_two_that_share_a_prefix_waits_and_all_finish():
    engine = build(tiny_model(1, diffusion=tiny_diffusion(), max_seq_len=1024), kv_tokens=1024)
    shared, asked = tuple(range(64)), {"mode": "ar", "logit_bias": {END_ID: -100.0}}
    for key in (0, 1):
        engine.scheduler.add(key, Request(prompt_ids=(*shared, 100 + key), max_tokens=330, **asked))
        engine.scheduler.step()
    scored = Request(prompt_ids=tuple(range(100, 140)), max_tokens=945, prompt_logprobs=0, **asked)
    assert engine.pages.count_pages(engine._count_places(scored)) > engine.pages.store.num_pages - 2
    engine.scheduler.add(2, scored)
    for _ in range(400):
        engine.scheduler.step()
        if engine.scheduler.num_running == 1:
            break
    engine.scheduler.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 0)


def build_gapped(seed):
    """A model of twelve ids over a few letters: no token spells an "e"."""
    letters = {"a": 0, "b": 1, "c": 2, "d": 3, "f": 5, "<mask>": GAP_MASK, "<end>": GAP_END, "g": 9}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<mask>", "<end>")])
    diffusion = DiffusionConfig(
        block_size=4,
        trained_block_sizes=(4,),
        shift_logits=True,
        mask_token_id=GAP_MASK,
        clean_attention="causal",
    )
    loaded = tiny_model(seed, diffusion=diffusion, vocab_size=12)
    return SimpleNamespace(
        decoder=loaded.decoder,
        config=loaded.config,
        diffusion=diffusion,
        tokenizer=Tokenizer(backend, eos_token_ids=[GAP_END], chat_template=None),
    )


DEAD_END = Constraint.regex("([abc]|[dg]e)*f")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_form_that_no_token_can_go_on_with_fails_its_request_and_nothing_else(mode, fused):
    num_failed = 0
    for seed in range(5):
        engine = build(build_gapped(seed))
        bias = {3: 100.0} if seed % 2 else {}  # a "d" leads into the dead end
        asked = {"prompt_ids": (0, 1), "max_tokens": 8, "mode": mode, "fused_commit": fused}
        engine.scheduler.add("led", Request(constraint=DEAD_END, logit_bias=bias, **asked))
        engine.scheduler.add("free", Request(**asked))
        ends = run(engine.scheduler, 200)
        assert len(ends) == 2
        assert isinstance(ends["led"], GenerationError) or not bias
        num_failed += isinstance(ends["led"], GenerationError)
        assert ends["free"].token_ids == build(build_gapped(seed)).generate(Request(**asked)).token_ids
        assert engine.pages.num_used == 0
    assert num_failed >= 2


@pytest.mark.parametrize("drafting", [{}, {"denoising_steps": 3}, {"draft_lanes": 3}])
@pytest.mark.parametrize("spelled", ["e", f"<[{GAP_MASK}]>"])
def test_a_draft_into_a_dead_end_costs_nothing_where_the_ar_path_stays_out(drafting, spelled):
    # The AR path takes the long way round; drafts, pushed by an untrained anchor, do not know the way.
    text = 'start: ("a" | "b" | "c" | dead)* "f"\ndead: ("d" | "g") ' + (
        f'"{spelled}"' if spelled == "e" else spelled
    )
    constraint, outcomes = Constraint(kind="lark", text=text + "\n"), set()
    for seed in range(24):
        engine = build(build_gapped(seed))
        for temperature in (0.0, 1.0):
            asked = {"prompt_ids": (0, 1), "max_tokens": 8, "constraint": constraint, "temperature": temperature}
            ends = [
                engine.generate_many([Request(mode=mode, **asked, **more)])[0]
                for mode, more in (("ar", {}), ("verified", drafting))
            ]
            outcomes.add((temperature, *(isinstance(end, GenerationError) for end in ends)))
            if temperature == 0.0:
                shown = [
                    end.one_line() if isinstance(end, GenerationError) else (end.token_ids, end.finish_reason)
                    for end in ends
                ]
                assert shown[0] == shown[1]
    assert (0.0, False, False) in outcomes
    assert (0.0, False, True) not in outcomes
    assert (0.0, True, False) not in outcomes


def test_a_tiny_repetition_penalty_is_no_fault_of_the_model():
    for mode in MODES:
        got = build().generate(ask(mode=mode, repetition_penalty=1e-40))
        assert len(got.token_ids) == 8
        assert set(got.token_ids) <= {*ask().prompt_ids, *got.token_ids[:1]}


@pytest.mark.parametrize("value", [100.5, -101.0, 1e39, float("inf"), float("nan")])
def test_a_bias_beyond_what_logits_can_hold_is_refused(value):
    with pytest.raises(RequestError, match="logit_bias"):
        Request(prompt_ids=(1,), max_tokens=1, logit_bias={5: value})


@pytest.mark.parametrize("idx", [-1, 260])
def test_ids_that_are_never_emitted_must_be_of_the_vocabulary(idx):
    with pytest.raises(ConfigError, match="never_emit_ids"):
        build(never_emit_ids=(idx,))


def test_a_clock_that_sees_no_pass_leads_to_ar_steps():
    @dataclasses.dataclass
    class Frozen(SystemClock):
        def seconds(self):
            return 5.0

    engine = Engine(tiny_model(1, diffusion=tiny_diffusion()), clock=Frozen())
    got = engine.generate(ask(mode="verified", draft_len="auto"))
    assert got.num_forward_passes == len(got.token_ids) == 8
    assert torch.is_grad_enabled()
