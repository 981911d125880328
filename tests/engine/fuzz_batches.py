"""Random request mixes: run together they give the answers that each request gives alone.

`python tests/engine/fuzz_batches.py 10000 [MINUTES] [RESULTS]` tries so many mixes and ends with one JSON object. It
stops after the minutes given and says how many mixes it came to; a results file is written, and one that the same
commit left is gone on with. A mix draws requests of mixed lengths, modes,
policies, sampling settings, penalties, log probabilities, stops, constraints and seeds over one tiny fp32 model, some
of them several times with other seeds. It lets them arrive at random moments, drops some in the middle, and shrinks
prompt chunks, places and KV memory at random.
"""

import json
import math
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch

from ar2diff.clock import SystemClock
from ar2diff.engine.config import EngineConfig
from ar2diff.engine.constraint import Constraint
from ar2diff.engine.engine import Engine
from ar2diff.engine.grammar import GrammarCompiler
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError
from ar2diff.testing.models import END_ID, MASK_ID, byte_tokenizer, tiny_diffusion, tiny_model

FORMS = [(True, "causal"), (True, "block"), (False, "causal"), (False, "block")]
POOL = 120
MAX_SEQ_LEN = 160
POLICIES = [("top_k", None), ("threshold", 0.1), ("factor", 1.4), ("entropy", 3.0), ("left_to_right", None)]
CONSTRAINTS = [
    Constraint.regex("[a-c]{1,9}(é|x)*"),
    Constraint.json_schema({"type": "array", "items": {"enum": ["a", True, 3]}, "maxItems": 4}),
    Constraint(kind="lark", text='start: "add " body\nbody: %json {"type": "array", "items": {"type": "integer"}}\n'),
]
CHUNKS = [1, *[7, 32, 512] * 5]
"""Prompts token by token take ten times the forwards of all others, so few mixes do."""
TOLERANCE = 1e-3
"""Of log probabilities: sums of floats depend a little on the shape of a matrix."""
SEEN: Counter[str] = Counter()
"""Answers compared, by mode."""
GRAMMARS = GrammarCompiler(byte_tokenizer(), 260)


def build_engine(form, **config):
    engine = Engine(build_model(form), clock=SystemClock(), config=EngineConfig(**config))
    engine.grammars = GRAMMARS  # compiled once for all mixes
    return engine


@lru_cache(maxsize=8)
def build_model(form):
    shift, clean = FORMS[form]
    diffusion = tiny_diffusion(
        shift_logits=shift, clean_attention=clean, block_size=4, trained_block_sizes=(1, 2, 4, 8)
    )
    return tiny_model(form, diffusion=diffusion, max_seq_len=MAX_SEQ_LEN)


@cache
def draw_request(form, idx, choice=0):
    """Request `idx` of a form's pool, under another seed for each of its n choices; prompts often begin alike."""
    if choice:
        first = draw_request(form, idx)
        return replace(first, seed=(first.seed + choice) % 2**32)
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
        min_p=draw.choice([0.0, 0.0, 0.2]),
        presence_penalty=draw.choice([0.0, 0.0, 1.5]),
        frequency_penalty=draw.choice([0.0, 0.0, -0.5, 1.0]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        top_logprobs=draw.choice([0, 0, 3]),
        prompt_logprobs=draw.choice([None, None, None, 0, 2]) if form == 0 else None,
        constraint=draw.choice([None, None, None, *CONSTRAINTS]),
        include_stop=draw.random() < 0.5,
        seed=draw.randrange(2**32),
        stop=draw.choice([(), (), ("e",), ("a", "\x02")]),
        logit_bias=draw.choice([{}, {END_ID: 100.0}, {END_ID: -100.0}, {65: 3.0}]),
        fused_commit=draw.random() < 0.3,
        adaptive_draft=draw.random() < 0.5,
        draft_lanes=draw.choice([0, 1, 3]),
        copy_drafts=draw.random() < 0.5,
    )


@cache
def answer_alone(form, idx, choice):
    """The answer of an engine that has never seen anything else."""
    return build_engine(form).generate_many([draw_request(form, idx, choice)])[0]


def show(generation):
    if isinstance(generation, Ar2diffError):
        return generation.one_line()
    return generation.token_ids, generation.text, generation.finish_reason


def is_same(one, other):
    """Equal ids and text, or the same error; equal log probabilities but for rounding."""
    if isinstance(one, Ar2diffError) or isinstance(other, Ar2diffError):
        return show(one) == show(other)
    values = list(zip(list_logprobs(one), list_logprobs(other), strict=False))
    is_close = all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in values)
    return show(one) == show(other) and is_close and len(list_logprobs(one)) == len(list_logprobs(other))


def list_logprobs(generation):
    tops = [*generation.top_logprobs, *generation.prompt_top_logprobs]
    return [
        *generation.logprobs,
        *generation.prompt_logprobs[1:],
        *(logprob for row in tops for _, logprob in row),
    ]


def find_difference(seed):
    """What a mix answers otherwise than its requests alone, or None; counts leaks of KV memory as well."""
    draw = random.Random(seed)
    form = draw.randrange(len(FORMS))
    config = {
        "prefill_chunk": draw.choice(CHUNKS),
        "max_running": draw.randint(1, 8),
        "kv_tokens": draw.choice([None, 192, 512]),
    }
    engine = build_engine(form, **config)
    wanted = {key: (draw.randrange(POOL), draw.choice([0, 0, 1, 2])) for key in range(draw.randint(2, 9))}
    arriving, answers = sorted(wanted), {}
    draw.shuffle(arriving)
    dropped = {key for key in wanted if draw.random() < 0.1}
    while arriving or len(answers) + len(dropped & set(wanted)) < len(wanted):
        while arriving and draw.random() < 0.5:
            key = arriving.pop()
            engine.scheduler.add(key, draw_request(form, *wanted[key]))
        for key, result in engine.scheduler.step():
            end = result if isinstance(result, Ar2diffError) else result.generation
            if end is not None:
                answers[key] = end
                dropped.discard(key)
        for key in sorted(dropped - set(arriving)):
            if draw.random() < 0.2:
                engine.scheduler.remove(key)
                dropped.discard(key)
                wanted.pop(key)
    for key in list(dropped):
        engine.scheduler.remove(key)
    for key, answer in answers.items():
        SEEN[draw_request(form, *wanted[key]).mode] += 1
        if not is_same(answer, alone := answer_alone(form, *wanted[key])):
            return f"mix {seed}, form {form}, request {wanted[key]}, {config}: {show(answer)} and alone {show(alone)}"
    if engine.pages.num_used:
        return f"mix {seed}: {engine.pages.num_used} pages leaked"
    return None


def read_commit():
    """The commit that the code is of, with a plus where files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head, changed = (
        subprocess.run([*git, *asked], capture_output=True, text=True, check=False).stdout.strip()
        for asked in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    return head + ("+" if changed else "")


def read_earlier(results, commit):
    """What a run of the same commit left, or a report of nothing."""
    fresh = {"commit": commit, "mixes": 0, "minutes": 0.0, "differences": [], "answers_compared": {}}
    if results is None or not results.exists():
        return fresh
    earlier = json.loads(results.read_text(encoding="utf-8"))
    return earlier if earlier["commit"] == commit else fresh


def main(count, minutes=math.inf, results=None):
    torch.set_num_threads(1)
    started, earlier = time.monotonic(), read_earlier(results, read_commit())
    found, tried = earlier["differences"], earlier["mixes"]
    SEEN.update(earlier["answers_compared"])
    while tried < count and time.monotonic() - started < 60 * minutes:
        if (difference := find_difference(tried)) is not None:
            found.append(difference)
            print(difference, file=sys.stderr, flush=True)
        tried += 1
        if tried % 100 == 0:
            elapsed = round(time.monotonic() - started)
            print(f"{tried} mixes, {len(found)} differences, {elapsed} s", file=sys.stderr, flush=True)
    bar = {"name": "mixes that differ", "value": len(found), "bar": 0, "better": "lower", "holds": not found}
    report = {
        "benchmark": "fuzz_batches",
        "mixes": tried,
        "mixes_asked": count,
        "seeds": [0, tried - 1],
        "distinct_requests": 3 * len(FORMS) * POOL,
        "answers_compared": dict(SEEN),
        "differences": found,
        "minutes": round(earlier["minutes"] + (time.monotonic() - started) / 60, 1),
        "commit": earlier["commit"],
        "bars": [bar],
        "hardware": {"machine": platform.machine(), "threads": 1},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    if results is not None:
        results.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]) if given else 10_000, float(given[1]) if given[1:] else math.inf, *map(Path, given[2:3]))
