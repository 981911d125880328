"""Constrained answers: always of the form asked for, in every mode, and still the reference's and the AR answers."""

import json
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ar2diff.engine.constraint import Constraint
from ar2diff.engine.reference import generate_reference
from ar2diff.engine.request import Request

MODES = ["diffusion", "verified", "ar"]
FORMS = [(True, "causal"), (True, "block"), (False, "causal"), (False, "block")]
PROMPT = (10, 11, 12)
CALL = {
    "type": "object",
    "properties": {"name": {"enum": ["f", "g"]}, "arguments": {"type": "object", "additionalProperties": False}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "object": Constraint.json_object(),
    "schema": Constraint.json_schema(
        {
            "type": "object",
            "properties": {"name": {"enum": ["é", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["name", "n"],
            "additionalProperties": False,
        }
    ),
    "regex": Constraint.regex(r"(ab|a|é😀){2,9}\.?"),
    "tools": Constraint(kind="lark", text=f'start: <[258]> body "\\n"\nbody: %json {json.dumps(CALL)}\n'),
}


@pytest.fixture(scope="module")
def pairs(kit):
    """Models of every form with their engines."""
    loaded = {form: kit.loaded(shift=form[0], clean=form[1], sharp=1.5, max_seq_len=128) for form in FORMS}
    return {form: (model, kit.engine(model)) for form, model in loaded.items()}


def in_mode(mode, form):
    return form if mode == "diffusion" else (True, "causal")


leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^x[0-9]{1,2}$"},
        {"enum": ["é", 'q"', 3, None]},
        {"const": "\u2028\n"},
        {"type": "number", "minimum": 0, "maximum": 1},
    ]
)


def build_object(properties, optional):
    required = sorted(properties)[optional:]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(build_object, st.dictionaries(st.sampled_from(["a", "bé"]), inner, max_size=2), st.integers(0, 1)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=4,
)


@given(
    schema=schemas,
    mode=st.sampled_from(MODES),
    form=st.sampled_from(FORMS),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
    fused=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_an_answer_that_stops_is_valid_under_any_schema(schema, mode, form, temperature, seed, fused, pairs):
    _, engine = pairs[in_mode(mode, form)]
    constraint = Constraint.json_schema(schema)
    asked = {"temperature": temperature, "seed": seed, "fused_commit": fused, "draft_lanes": seed % 3}
    got = engine.generate(Request(prompt_ids=PROMPT, max_tokens=60, mode=mode, constraint=constraint, **asked))
    if got.finish_reason == "stop":
        jsonschema.validate(json.loads(got.text), schema)
    else:
        assert len(got.token_ids) == 60
        grammar = engine.grammars.compile(constraint)
        assert grammar.start().count_allowed(got.token_ids) == 60


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("mode", MODES)
def test_most_random_answers_come_to_an_end(pairs, mode, name):
    _, engine = pairs[True, "causal"]
    asked = {"prompt_ids": PROMPT, "max_tokens": 100, "mode": mode, "constraint": CONSTRAINTS[name]}
    answers = [engine.generate(Request(seed=seed, temperature=1.0, **asked)) for seed in range(4)]
    done = [answer.text for answer in answers if answer.finish_reason == "stop"]
    assert len(done) >= {"object": 1, "tools": 2}.get(name, 4)
    for text in done:
        if name == "regex":
            assert re.fullmatch(r"(ab|a|é😀){2,9}\.?", text)
        else:
            assert isinstance(json.loads(text), dict)


@given(
    name=st.sampled_from(sorted(CONSTRAINTS)),
    mode=st.sampled_from(MODES),
    form=st.sampled_from(FORMS),
    policy=st.sampled_from(["top_k", "threshold", "factor", "entropy", "left_to_right"]),
    steps=st.sampled_from([None, 1, 2]),
    fused=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 10**6),
    max_tokens=st.integers(1, 24),
    penalty=st.sampled_from([0.0, 1.5]),
    stop=st.sampled_from([(), ("b",), ('"n', "é")]),
)
@settings(max_examples=60, deadline=None)
def test_a_constrained_answer_equals_the_reference(
    name, mode, form, policy, steps, fused, temperature, seed, max_tokens, penalty, stop, pairs
):
    loaded, engine = pairs[in_mode(mode, form)]
    request = Request(
        prompt_ids=PROMPT,
        max_tokens=max_tokens,
        mode=mode,
        policy=policy,
        denoising_steps=steps,
        fused_commit=fused,
        temperature=0.0 if mode == "verified" else temperature,
        seed=seed,
        frequency_penalty=penalty,
        stop=stop,
        top_logprobs=2,
        constraint=CONSTRAINTS[name],
    )
    got = engine.generate(request)
    want = generate_reference(loaded, request, grammar=engine.grammars.compile(request.constraint))
    assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)


@given(
    name=st.sampled_from(sorted(CONSTRAINTS)),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=6).map(tuple),
    lanes=st.integers(0, 3),
    steps=st.sampled_from([None, 2, 3]),
    penalty=st.sampled_from([0.0, 1.0]),
    bias=st.dictionaries(st.integers(32, 126), st.floats(-5, 5), max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_constrained_verified_answers_are_constrained_ar_answers(name, prompt, lanes, steps, penalty, bias, pairs):
    _, engine = pairs[True, "causal"]
    asked = {"prompt_ids": prompt, "max_tokens": 30, "constraint": CONSTRAINTS[name], "presence_penalty": penalty}
    asked |= {"logit_bias": bias, "block_size": 8}
    ar = engine.generate(Request(mode="ar", **asked))
    got = engine.generate(Request(mode="verified", denoising_steps=steps, draft_lanes=lanes, **asked))
    assert (got.token_ids, got.finish_reason) == (ar.token_ids, ar.finish_reason)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_says_the_right_thing_says_it_in_few_passes(kit, mode):
    text = '{"a": [1, 2]}'
    loaded = kit.loaded()
    tokens = {len(PROMPT) + idx: byte for idx, byte in enumerate(text.encode())}
    engine = kit.script(loaded, tokens).attach(kit.engine(loaded))
    request = Request(prompt_ids=PROMPT, max_tokens=40, mode=mode, constraint=Constraint.json_object())
    got = engine.generate(request)
    assert (got.text, got.finish_reason) == (text, "stop")
    # One forward a token in AR mode; whole blocks of 4 otherwise: nothing waits for an end of turn.
    assert got.num_forward_passes <= {"ar": len(text), "diffusion": 2 * 4, "verified": 2 * 4 + 1}[mode]


def test_tokens_that_break_the_form_return_to_mask_and_are_chosen_again(kit):
    loaded = kit.loaded(shift=False)
    # Every place says "a" at once; the form wants "aab": the third comes back as a mask.
    engine = kit.script(loaded, {}).attach(kit.engine(loaded))
    request = Request(prompt_ids=PROMPT, max_tokens=9, trace=True, constraint=Constraint.regex("aabaa"))
    shown = [step.token_ids for step in engine.generate(request).passes]
    a, b = ord("a"), ord("b")
    assert shown == [(a, a, None, None), (a, a, b, a), (a, None, None, None)]


def test_a_pass_that_says_an_end_and_more_behind_it_ends_there(kit):
    # Unshifted and sure of all: "a" and then ends of turn; the form takes one of them, and nothing behind it.
    loaded = kit.loaded(shift=False)
    engine = kit.script(loaded, dict.fromkeys(range(4, 40), kit.END)).attach(kit.engine(loaded))
    got = engine.generate(Request(prompt_ids=PROMPT, max_tokens=9, constraint=Constraint.regex("ab*")))
    assert (got.text, got.finish_reason, got.passes_per_block) == ("a", "stop", (1,))


def test_a_fused_first_pass_reveals_the_anchor_and_what_the_policy_picks_beside_it(kit):
    loaded = kit.loaded()
    sure = {4: 5.0, 5: 5.0, 6: 12.0}  # the last place of the first block first: it must wait for those before it
    engine = kit.script(loaded, {}, confidence=sure).attach(kit.engine(loaded))
    asked = {"max_tokens": 8, "policy": "top_k", "fused_commit": True, "trace": True}
    shown = engine.generate(Request(prompt_ids=PROMPT, constraint=Constraint.regex("a{8}"), **asked)).passes
    a = ord("a")
    assert [step.token_ids for step in shown[:2]] == [(a, None, None, None), (a, a, None, None)]


@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_turn_comes_only_where_the_form_is_complete(kit, mode):
    loaded = kit.loaded()
    engine = kit.script(loaded, dict.fromkeys(range(3, 40), kit.END)).attach(kit.engine(loaded))
    asked = {"prompt_ids": PROMPT, "max_tokens": 20, "mode": mode}
    got = engine.generate(Request(constraint=Constraint.regex("x{5}y*"), **asked))
    assert (got.text, got.finish_reason) == ("xxxxx", "stop")


@pytest.mark.parametrize("mode", MODES)
def test_control_tokens_come_only_where_a_grammar_names_them(kit, mode):
    loaded = kit.loaded()
    engine = kit.script(loaded, dict.fromkeys(range(3, 60), kit.PAD)).attach(kit.engine(loaded))
    asked = {"prompt_ids": PROMPT, "max_tokens": 8, "mode": mode}
    got = engine.generate(Request(constraint=Constraint.regex("(.|\n)*"), **asked))
    assert kit.PAD not in got.token_ids
    named = Constraint(kind="lark", text=f"start: <[{kit.PAD}]> /.*/\n")
    assert engine.generate(Request(constraint=named, **asked)).token_ids[0] == kit.PAD
