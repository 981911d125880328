"""Compiling constraints: what is refused, how fast, and the vocabularies they are compiled for."""

import json
import resource
import subprocess
import sys
import time

import pytest
import tokenizers
from tokenizers import decoders, models

from ar2diff.engine.constraint import MAX_CONSTRAINT_LEN, Constraint
from ar2diff.engine.grammar import GrammarCompiler
from ar2diff.engine.grammar_check import MAX_CPU_S
from ar2diff.engine.request import Request
from ar2diff.errors import RequestError
from ar2diff.tokenizer import Tokenizer


def processor_s():
    """Processor time of this process and of those it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def nest(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def build_all_of(count):
    def has(name):
        return {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}

    return {"allOf": [{"anyOf": [has(f"p{idx}"), has(f"q{idx}")]} for idx in range(count)]}


REFUSED = {
    "a regex that does not parse": lambda: Constraint.regex("(a"),
    "look-around": lambda: Constraint.regex("(?=a)b"),
    "a back-reference": lambda: Constraint.regex(r"(a)\1"),
    "brackets 100,000 deep": lambda: Constraint.regex("(" * 100_000 + "a" + ")" * 100_000),
    "stars on stars": lambda: Constraint.regex("(" * 300 + "a" + ")*" * 300),
    "a regex nothing matches": lambda: Constraint.regex(r"[^\x00-\x{10FFFF}]"),
    "a reference to itself": lambda: Constraint.json_schema({"$ref": "#"}),
    "references in a circle": lambda: Constraint.json_schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "a remote reference": lambda: Constraint.json_schema({"$ref": "http://127.0.0.1:1/x.json"}),
    "a schema 90 deep": lambda: Constraint.json_schema(nest(90)),
    "a schema 100,000 deep": lambda: Constraint.json_schema(nest(100_000)),
    "a product of 2^20 schemas": lambda: Constraint.json_schema(build_all_of(20)),
    "a huge divisor": lambda: Constraint.json_schema({"type": "integer", "multipleOf": 1_234_567}),
    "an unknown type": lambda: Constraint.json_schema({"type": "text"}),
    "a keyword that cannot be kept": lambda: Constraint.json_schema({"type": "array", "uniqueItems": True}),
    "a schema nothing fits": lambda: Constraint.json_schema({"type": "string", "enum": [1]}),
    "no JSON value": lambda: Constraint.json_schema({"const": {1, 2}}),
    "not a number": lambda: Constraint.json_schema({"const": float("nan")}),
    "a text beyond the limit": lambda: Constraint.regex("a" * (MAX_CONSTRAINT_LEN + 1)),
    "an unknown kind": lambda: Constraint(kind="gbnf", text="x"),
    "a broken grammar": lambda: Constraint(kind="lark", text="start: undefined"),
}


@pytest.fixture(scope="module")
def compiler(kit):
    return GrammarCompiler(kit.tokenizer, 262)


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_is_refused_in_time(compiler, build):
    started = processor_s()
    with pytest.raises(RequestError) as caught:
        compiler.compile(build())
    assert processor_s() - started < MAX_CPU_S + 1.0
    assert len(caught.value.one_line()) < 400


HEAVY = {
    "a bounded repeat": lambda: Constraint.regex("(a|b)*a(a|b){200}"),
    "nested repeats": lambda: Constraint.regex("((a{0,1000}){0,1000}){0,1000}"),
    "nested plus": lambda: Constraint.regex("(a+)+$"),
    "many letters": lambda: Constraint.regex(r"(\p{L}{1,500}\p{N}{1,500}){1,500}"),
    "ten thousand values": lambda: Constraint.json_schema({"enum": [f"{idx:06}" for idx in range(10_000)]}),
    "endless depth": lambda: Constraint.json_schema({"type": "object", "properties": {"x": {"$ref": "#"}}}),
    "long strings": lambda: Constraint.json_schema({"type": "string", "minLength": 10**6}),
    "many items": lambda: Constraint.json_schema({"type": "array", "items": {}, "minItems": 10**6}),
}


@pytest.mark.parametrize("build", HEAVY.values(), ids=HEAVY)
def test_heavy_constraints_compile_and_lead_an_answer(kit, build):
    loaded = kit.loaded()
    engine = kit.engine(loaded)
    request = Request(prompt_ids=(5, 6), max_tokens=20, temperature=1.0, constraint=build())
    started = processor_s()
    got = engine.generate(request)
    assert processor_s() - started < MAX_CPU_S + 5.0
    assert engine.grammars.compile(request.constraint).start().count_allowed(got.token_ids) == len(got.token_ids)


def test_a_constraint_is_compiled_once_and_each_answer_has_its_own_state(compiler):
    one = compiler.compile(Constraint.regex("ab"))
    assert compiler.compile(Constraint.regex("ab")) is one
    first, second = one.start(), one.start()
    first.advance(ord("a"))
    assert first.allowed().nonzero().flatten().tolist() == [ord("b")]
    assert second.allowed().nonzero().flatten().tolist() == [ord("a")]
    fork = first.fork()
    fork.advance(ord("b"))
    assert (fork.is_complete, first.is_complete) == (True, False)


def test_looking_ahead_moves_nothing_and_ends_where_a_token_may_not_follow(compiler, kit):
    form = compiler.compile(Constraint.regex("a?b")).start()
    a, b = ord("a"), ord("b")
    shown = [mask.nonzero().flatten().tolist() for mask in form.look_ahead([a, b, kit.END])]
    assert shown == [[a, b], [b], [kit.END]]
    assert len(form.look_ahead([b, b])) == 2
    assert form.count_allowed([a, b, kit.END]) == 3
    assert form.count_allowed([a, a]) == 1
    assert form.allowed().nonzero().flatten().tolist() == [a, b]


def test_any_end_of_turn_ends_a_form():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "Ċ": 2}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<e>", "<f>", "<g>")])
    tokenizer = Tokenizer(backend, eos_token_ids=[4, 3], chat_template=None)
    form = GrammarCompiler(tokenizer, 9).compile(Constraint.regex("(a|\n)+")).start()
    assert form.allowed().nonzero().flatten().tolist() == [0, 2]
    form.advance(2)
    assert form.allowed().nonzero().flatten().tolist() == [0, 2, 3, 4]


def test_tokens_in_the_way_of_sentencepiece_stand_for_their_bytes():
    vocab = {"<0xC3>": 0, "<0xA9>": 1, "▁a": 2, "é": 3, "<unk>": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([tokenizers.AddedToken("<e>", special=True)])
    tokenizer = Tokenizer(backend, eos_token_ids=[5], chat_template=None)
    assert [tokenizer.token_bytes(idx) for idx in range(7)] == [
        b"\xc3", b"\xa9", b" a", "é".encode(), b"<unk>", b"<e>", b"",
    ]  # fmt: skip
    form = GrammarCompiler(tokenizer, 6).compile(Constraint.regex("é a")).start()
    assert form.count_allowed([0, 1, 2, 5]) == 4
    assert form.count_allowed([3, 2]) == 2


def test_byte_level_tokens_join_to_the_text(kit):
    text = 'aé€😀"\n\t oSTOPx'
    ids = kit.tokenizer.encode(text)
    assert b"".join(kit.tokenizer.token_bytes(idx) for idx in ids).decode() == text
    assert kit.tokenizer.token_bytes(kit.END) == b"<|im_end|>"


def test_a_missing_grammar_library_is_named(compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="constrained"):
        compiler.compile(Constraint.regex("never compiled before"))


def test_the_engine_loads_without_the_grammar_library():
    code = "import sys, json; sys.modules['llguidance'] = None; import ar2diff.engine.engine; print(json.dumps(1))"
    assert json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) == 1
