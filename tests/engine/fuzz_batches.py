"""Random request mixes: run together they give the answers that each request gives alone.

`python tests/engine/fuzz_batches.py 10000` tries so many mixes and ends with one JSON object. A mix draws requests of
mixed lengths, modes, policies, temperatures and seeds over one tiny fp32 model, lets them arrive at random moments,
drops some in the middle, and shrinks prompt chunks, places and KV memory at random.
"""

import json
import platform
import random
import sys
import time
from functools import cache, lru_cache

import torch

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.engine import Engine
from ar2diff.engine.request import Request
from ar2diff.testing.models import END_ID, MASK_ID, tiny_diffusion, tiny_model

FORMS = [(True, "causal"), (True, "block"), (False, "causal"), (False, "block")]
POOL = 120
MAX_SEQ_LEN = 160
POLICIES = [("top_k", None), ("threshold", 0.1), ("factor", 1.4), ("entropy", 3.0), ("left_to_right", None)]


def build_engine(form, **config):
    return Engine(build_model(form), clock=SystemClock(), config=EngineConfig(**config))


@lru_cache(maxsize=8)
def build_model(form):
    shift, clean = FORMS[form]
    diffusion = tiny_diffusion(
        shift_logits=shift, clean_attention=clean, block_size=4, trained_block_sizes=(1, 2, 4, 8)
    )
    return tiny_model(form, diffusion=diffusion, max_seq_len=MAX_SEQ_LEN)


def draw_request(form, idx):
    """Request `idx` of a form's pool; prompts often begin alike."""
    draw = random.Random(f"{form} {idx}")
    policy, parameter = draw.choice(POLICIES)
    modes = ["diffusion", "verified", "ar"] if form == 0 else ["diffusion"]
    prompt = [7 * place % 256 for place in range(draw.choice([0, 0, 33, 64, 70]))]
    prompt += [draw.choice([*range(256), MASK_ID]) for _ in range(draw.randint(1, 40))]
    return Request(
        prompt_ids=tuple(prompt),
        max_tokens=draw.choice([1, 3, 4, 5, 9, 17]),
        mode=draw.choice(modes),
        block_size=draw.choice([None, 1, 2, 4, 8]),
        denoising_steps=draw.choice([None, 1, 2, 3]),
        policy=policy,
        policy_parameter=parameter,
        temperature=draw.choice([0.0, 0.0, 1e-6, 0.7, 2.0]),
        top_p=draw.choice([1.0, 0.9, 1e-9]),
        top_k=draw.choice([None, 1, 20]),
        seed=draw.randrange(2**32),
        stop=draw.choice([(), (), ("e",), ("a", "\x02")]),
        logit_bias=draw.choice([{}, {END_ID: 100.0}, {END_ID: -100.0}, {65: 3.0}]),
        fused_commit=draw.random() < 0.3,
        adaptive_draft=draw.random() < 0.5,
        draft_lanes=draw.choice([0, 1, 3]),
    )


@cache
def answer_alone(form, idx):
    """The answer of an engine that has never seen anything else."""
    return show(build_engine(form).generate(draw_request(form, idx)))


def show(generation):
    return generation.token_ids, generation.text, generation.finish_reason


def find_difference(seed):
    """What a mix answers otherwise than its requests alone, or None; counts leaks of KV memory as well."""
    draw = random.Random(seed)
    form = draw.randrange(len(FORMS))
    config = {
        "prefill_chunk": draw.choice([1, 5, 32, 512]),
        "max_running": draw.randint(1, 8),
        "kv_tokens": draw.choice([None, 192, 512]),
    }
    engine = build_engine(form, **config)
    wanted = {key: draw.randrange(POOL) for key in range(draw.randint(2, 9))}
    arriving, answers = sorted(wanted), {}
    draw.shuffle(arriving)
    dropped = {key for key in wanted if draw.random() < 0.1}
    while arriving or len(answers) + len(dropped & set(wanted)) < len(wanted):
        while arriving and draw.random() < 0.5:
            key = arriving.pop()
            engine.scheduler.add(key, draw_request(form, wanted[key]))
        for key, result in engine.scheduler.step():
            if getattr(result, "generation", None) is not None:
                answers[key] = show(result.generation)
                dropped.discard(key)
        for key in sorted(dropped - set(arriving)):
            if draw.random() < 0.2:
                engine.scheduler.remove(key)
                dropped.discard(key)
                wanted.pop(key)
    for key in list(dropped):
        engine.scheduler.remove(key)
    for key, answer in answers.items():
        if answer != (alone := answer_alone(form, wanted[key])):
            return f"mix {seed}, form {form}, request {wanted[key]}, {config}: {answer} and alone {alone}"
    if engine.pages.num_used:
        return f"mix {seed}: {engine.pages.num_used} pages leaked"
    return None


def main(count):
    torch.set_num_threads(1)
    started, found = time.monotonic(), []
    for seed in range(count):
        if (difference := find_difference(seed)) is not None:
            found.append(difference)
            print(difference, file=sys.stderr)
        if (seed + 1) % 1000 == 0:
            print(f"{seed + 1} mixes, {len(found)} differences", file=sys.stderr)
    bar = {"name": "mixes that differ", "value": len(found), "bar": 0, "better": "lower", "holds": not found}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    report = {"benchmark": "fuzz_batches", "mixes": count, "distinct_requests": len(FORMS) * POOL, "bars": [bar]}
    elapsed = {"seconds": round(time.monotonic() - started, 1), "machine": platform.machine()}
    print(json.dumps({**report, **elapsed, "versions": versions}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
