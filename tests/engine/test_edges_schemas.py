"""Constraints at their edges: words that bind nothing, and limits that cut a form in the middle."""

import json

import pytest

from ar2diff.engine.constraint import Constraint
from ar2diff.engine.request import Request
from ar2diff.errors import RequestError

MODES = ["ar", "diffusion", "verified"]
UNKNOWN = {
    "no_such_keyword at its root": {"type": "string", "no_such_keyword": 1},
    "minimumm at /properties/a/items": {"properties": {"a": {"items": {"minimumm": 3}}}},
    "nullable at /properties/a~1b": {"properties": {"a/b": {"type": "string", "nullable": True}}},
    "no at /anyOf/1": {"anyOf": [{"type": "null"}, {"no": 1}]},
    "no at /items/0": {"items": [{"no": 1}]},
    "no at /$defs/x": {"$ref": "#/$defs/x", "$defs": {"x": {"no": 1}}},
    "no at /not": {"not": {"no": 1}},
}


@pytest.mark.parametrize("problem", UNKNOWN)
def test_an_unknown_keyword_is_refused_with_its_name_and_place(problem):
    word, place = problem.split(" at ")
    schema = UNKNOWN[problem]
    for build in (Constraint.json_schema, lambda one: Constraint(kind="json_schema", text=json.dumps(one))):
        with pytest.raises(RequestError) as caught:
            build(schema)
        assert f"unknown keyword '{word}' at {place}." in caught.value.one_line()


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"no": {"const": {"no": 1}}, "x": {"enum": [{"no": 1}]}}, "x-no": {"no": 1}},
        {"type": "string", "title": "t", "description": "d", "default": {"no": 1}, "examples": [{"no": 1}]},
        {"anyOf": [{"type": "string"}, True], "discriminator": {"propertyName": "kind"}, "deprecated": True},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x", "$comment": "y"},
    ],
)
def test_names_of_properties_values_and_remarks_are_no_keywords(schema):
    assert json.loads(Constraint.json_schema(schema).text) == schema


def test_an_error_about_a_vast_schema_is_short_and_takes_no_memory_to_find():
    inner = {f"p{idx}": {"type": "null"} for idx in range(4000)}
    schema = {"properties": {"n" * 100_000: {"properties": {**inner, "last": {"no": 1}}}}}
    with pytest.raises(RequestError, match="unknown keyword 'no'") as caught:
        Constraint.json_schema(schema)
    assert len(caught.value.one_line()) < 400


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5])
def test_a_limit_in_the_middle_of_a_form_leaves_a_beginning_and_says_length(kit, mode, max_tokens):
    engine = kit.engine(kit.loaded())
    constraint = Constraint.json_schema({"type": "object", "required": ["name"], "properties": {"name": {}}})
    got = engine.generate(Request(prompt_ids=(5, 6), max_tokens=max_tokens, mode=mode, constraint=constraint))
    assert got.finish_reason == "length"
    assert len(got.token_ids) == max_tokens
    form = engine.grammars.compile(constraint).start()
    assert form.count_allowed(got.token_ids) == max_tokens
