"""Thinking and calls are read off tokens the same way however they are cut, and nothing is invented."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import make_tokenizer

from ar2diff.serve.reading.dialect import Dialect
from ar2diff.serve.reading.values import find_types

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "s": {"type": "string"},
        "b": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "l": {"$ref": "#/$defs/list"},
    },
    "required": ["a"],
    "$defs": {"list": {"type": "array"}},
}
TOOLS = {"f": SCHEMA, "g": {"type": "object", "properties": {}}}
DIALECTS = {
    (name, tags): Dialect(make_tokenizer(name, has_tags=tags))
    for name in ("hermes", "minicpm5", "llama3")
    for tags in (False, True)
}


def read(name, text, *, tags=False, tools=TOOLS, **plan):
    dialect = DIALECTS[name, tags]
    reader = dialect.plan(tools, **plan)()
    content = "".join(map(reader.push, dialect.tokenizer.encode(text, parse_special=True))) + reader.flush()
    return content, reader.reasoning, [(call.name, json.loads(call.arguments)) for call in reader.calls]


def xml(name="f", **params):
    return (
        f'<function name="{name}">'
        + "".join(f'<param name="{k}">{v}</param>' for k, v in params.items())
        + ("</function>")
    )


def hermes(arguments, name="f"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD = [
    ("minicpm5", xml(a=3, s="a &lt;&#98;&gt; &amp; &nbsp; AT&T"), [{"a": 3, "s": "a <b> & &nbsp; AT&T"}]),
    ("minicpm5", xml(a=1, s="<![CDATA[</function>\n</param> &lt;]]>"), [{"a": 1, "s": "</function>\n</param> &lt;"}]),
    ("minicpm5", xml(a=1, s="<![CDATA[x[y[1]]>3]]>"), [{"a": 1, "s": "x[y[1]]>3"}]),
    ("minicpm5", xml(a=1, s="<![CDATA[a]]]]><![CDATA[>b]]>"), [{"a": 1, "s": "a]]>b"}]),
    ("minicpm5", xml(a=1, b="True") + "\n" + xml(a=2, b="null"), [{"a": 1, "b": True}, {"a": 2, "b": None}]),
    (
        "minicpm5",
        xml(a=1, l='["</param></function>", {"k": null}]'),
        [{"a": 1, "l": ["</param></function>", {"k": None}]}],
    ),
    ("minicpm5", xml(a=1, l="['x', None]"), [{"a": 1, "l": ["x", None]}]),
    ("minicpm5", xml(a=1, s="  12 "), [{"a": 1, "s": "  12 "}]),
    ("hermes", hermes('{"a": "7", "s": "</tool_call>"}'), [{"a": 7, "s": "</tool_call>"}]),
    ("hermes", hermes('{"a": 1}') + "\n" + hermes('{"a": 2}'), [{"a": 1}, {"a": 2}]),
    ("llama3", '{"name": "f", "parameters": {"a": 1, "s": "}{"}}', [{"a": 1, "s": "}{"}]),
    (
        "llama3",
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}}',
        [{"a": 1}, {"a": 2}],
    ),
]


@pytest.mark.parametrize(("name", "text", "want"), GOOD)
@pytest.mark.parametrize("tags", [False, True])
def test_calls_are_read_with_values_in_the_types_of_the_schema(name, text, want, tags):
    assert read(name, text, tags=tags) == ("", "", [("f", arguments) for arguments in want])
    assert read(name, text + "\n\nDone.", tags=tags)[0] == "Done."


BAD = [
    *(
        ("minicpm5", text)
        for text in (xml("h", a=1), xml(s=1), xml(a=1, z=2), xml(a="x"), xml(a=1)[:-3], xml(a="1.5"))
    ),
    ("minicpm5", '<function name="f"><param name="a">1</param><param name="a">1</param></function>'),
    ("minicpm5", '<function name="f">1</function>'),
    ("minicpm5", xml(a=1, s="<![CDATA[never ends")),
    *(
        ("hermes", hermes(text))
        for text in ('{"a": 1, "a": 2}', '{"z": 1, "a": 1}', "{}", "[]", '{"a": [1]}', '{"a": 1', "NaN")
    ),
    ("hermes", hermes('{"a": 1}', "h")),
    ("hermes", '<tool_call>\n{"name": "f", '),
    ("hermes", "<tool_call>f</tool_call>"),
    *(
        ("llama3", text)
        for text in ('{"name": "f"}', '{"name": "f", "parameters": {"z": 1}}', '{"a": {}} x', '{"name": "f", "param')
    ),
]


@pytest.mark.parametrize(("name", "text"), BAD)
@pytest.mark.parametrize("tags", [False, True])
def test_what_is_no_call_of_a_tool_stays_content_to_the_letter(name, text, tags):
    assert read(name, text, tags=tags) == (text, "", [])
    around = f"Well,\n{text} so "
    assert read(name, around, tags=tags) == (around, "", [])


@pytest.mark.parametrize("tags", [False, True])
def test_thinking_is_apart_and_a_call_within_it_is_thinking(tags):
    text = f"<think>\nhm {hermes('{}')}\n\n</think>\n\nHello <b>\n{hermes('{{}}'.format(), 'g')}"
    content, reasoning, calls = read("hermes", text, tags=tags)
    assert (content, reasoning, calls) == ("Hello <b>", f"hm {hermes('{}')}", [("g", {})])
    assert read("hermes", "\nall of it", tags=tags, is_open=True) == ("", "all of it", [])
    assert read("hermes", "x</think>y", tags=tags, is_open=True, tools=None) == ("y", "x", [])


def test_a_spelled_marker_is_text_where_the_vocabulary_has_a_token():
    dialect = DIALECTS["hermes", True]
    reader = dialect.plan(TOOLS)()
    text = hermes('{"a": 1}')
    assert "".join(map(reader.push, text.encode())) + reader.flush() == text


def test_half_a_surrogate_pair_makes_a_call_content():
    text = hermes(r'{"a": 1, "s": "\ud800"}')
    assert read("hermes", text) == (text, "", [])


@pytest.mark.parametrize("width", [1, 300])
def test_types_are_found_at_once_however_often_a_schema_names_them(width):
    definitions = {f"d{idx}": {"anyOf": [{"$ref": f"#/$defs/d{idx + 1}"}] * width} for idx in range(9)}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**definitions, "d9": {"type": "integer"}}}
    assert find_types(schema["properties"]["a"], schema) == {"integer"}
    assert read("hermes", hermes('{"a": "7"}'), tools={"f": schema})[2] == [("f", {"a": 7})]
    endless = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    assert find_types(endless, endless) == {"null"}
    far = {f"d{idx}": {"$ref": f"#/d{idx + 1}"} for idx in range(2000)}
    assert find_types(far["d0"], far) is None


def test_a_single_call_ends_the_answer():
    dialect = DIALECTS["hermes", False]
    reader = dialect.plan(TOOLS, is_single=True)()
    content = "".join(map(reader.push, (hermes('{"a": 1}') + "x").encode())) + reader.flush()
    assert (content, reader.is_done, len(reader.calls)) == ("", True, 1)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([*(t for _, t, _ in GOOD), *(t for _, t in BAD), "<think>", "</think>", " \n", "é <", "x"]),
        max_size=5,
    ),
    st.sampled_from([*DIALECTS]),
)
def test_no_text_is_lost_or_shown_before_it_is_sure(parts, key):
    text = "".join(parts)
    dialect = DIALECTS[key]
    reader = dialect.plan(TOOLS)()
    shown = ""
    for token_id in dialect.tokenizer.encode(text, parse_special=True):
        shown += reader.push(token_id)
    whole = shown + reader.flush()
    again = read(key[0], text, tags=key[1])
    assert (whole, reader.reasoning) == again[:2]
    # Control tokens of other formats are left out of an answer, as everywhere.
    if not key[1] and "<think>" not in text and "</think>" not in text and not reader.calls:
        assert whole == text
