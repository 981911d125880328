"""Calls as elements, as MiniCPM5 writes them: `<function name="f"><param name="p">value</param></function>`.

A value is text with the entities of XML, or lies in CDATA sections. MiniCPM5's template puts a value with `<`, `&` or
a line end into one CDATA section and does not split `]]>`: where another `]]>` follows before the parameter closes,
the earlier one is text.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

from ar2diff.serve.reading.formats import write_json, write_terminal
from ar2diff.serve.reading.values import (
    Call,
    Tools,
    Unfinished,
    build_call,
    find_parameter,
    find_types,
    read_json,
    read_text,
)
from ar2diff.tokenizer import Tokenizer

_HEAD = re.compile(r"<function\s+name=([\"'])(.*?)\1\s*>\s*")
_PARAM = re.compile(r"<param\s+name=([\"'])(.*?)\1\s*>")
_CLOSE = re.compile(r"\s*</param>\s*")
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_ENTITY = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#(\d{1,7})|#x([0-9a-fA-F]{1,6}));")
_NAMED = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}
# A section ends at its first "]]>"; what has no need of a section is plain.
_TEXT_RULES = """text: /[^<&\\n]*/ | cdata
cdata: "<![CDATA[" section
section[suffix="]]>"]: /(?s:.*)/"""


class MiniCpm5:
    """The format of MiniCPM5."""

    sample: str = '<functionname="probe_call"><paramname="probe_key">probe_value</param></function>'
    begin: str = "<function"
    end: str | None = "</function>"
    inner: tuple[str, ...] = ("<param", "</param>")
    has_parallel = True

    def parse(self, block: str, tools: Tools) -> tuple[Call, str]:
        """As in `Format`."""
        head = _HEAD.match(block)
        if head is None or _unescape(head[2]) not in tools:
            raise ValueError("not a call")
        name, at = _unescape(head[2]), head.end()
        arguments: dict[str, Any] = {}
        while param := _PARAM.match(block, at):
            key = _unescape(param[2])
            if key in arguments:
                raise ValueError("a parameter twice")
            arguments[key], at = _read_value(block, param.end(), find_parameter(key, tools[name]), tools[name])
        if block[at:] != self.end:
            raise ValueError("not a call")
        return build_call(name, arguments, tools), ""

    def write_grammar(self, tools: Tools, tokenizer: Tokenizer) -> str:
        """As in `Format`; names, types and enumerations of texts hold, not their other keywords."""
        begin, end, param, close = (
            write_terminal(text, tokenizer) for text in (self.begin, "</function>", *self.inner)
        )
        rules = [f"call: {' | '.join(f'call{idx}' for idx in range(len(tools)))}", _TEXT_RULES]
        for idx, (name, schema) in enumerate(tools.items()):
            properties, required = schema.get("properties") or {}, schema.get("required") or ()
            params = [f"p{idx}_{at}{'' if key in required else '?'}" for at, key in enumerate(properties)]
            rules.append(f"call{idx}: {begin} {_quote(f' name={_attribute(name)}>')} {' '.join(params)} {end}")
            for at, (key, inner) in enumerate(properties.items()):
                head = _quote(f" name={_attribute(key)}>")
                rules.append(f"p{idx}_{at}: {param} {head} v{idx}_{at} {close}")
                rules.append(f"v{idx}_{at}: {_write_value(inner, schema)}")
        return "\n".join(rules)


def _read_value(block: str, at: int, schema: Any, root: Mapping[str, Any]) -> tuple[Any, int]:
    """The value that begins at `at`, and where the text after its `</param>` begins."""
    types = find_types(schema, root)
    if types and "string" not in types and not block.startswith(_CDATA, at):
        try:
            value, end = read_json(block, at)
        except ValueError:
            pass  # perhaps with entities, or as Python writes it
        else:
            if close := _CLOSE.match(block, end):
                return value, close.end()
    text, end = _read_characters(block, at)
    closed = _CLOSE.match(block, end)
    assert closed is not None
    return read_text(text, schema, root), closed.end()


def _read_characters(block: str, at: int) -> tuple[str, int]:
    """Text and CDATA sections up to `</param>`, and where that begins."""
    parts: list[str] = []
    while True:
        close, section = block.find("</param>", at), block.find(_CDATA, at)
        if close < 0 and section < 0:
            raise ValueError("a parameter that does not end")
        if section < 0 or 0 <= close < section:
            return "".join([*parts, _unescape(block[at:close])]), close
        start = section + len(_CDATA)
        first = block.find(_CDATA_END, start)
        if first < 0:
            raise Unfinished
        stops = [found for found in (block.find("</param>", first), block.find(_CDATA, first)) if found >= 0]
        if not stops:
            raise Unfinished
        last = block.rfind(_CDATA_END, first, min(stops))
        parts += [_unescape(block[at:section]), block[start:last]]
        at = last + len(_CDATA_END)


def _unescape(text: str) -> str:
    """Entities of XML as what they stand for; anything else that begins with `&` as it is."""

    def write(found: re.Match[str]) -> str:
        if found[1]:
            return _NAMED[found[1]]
        code = int(found[2]) if found[2] else int(found[3], 16)
        is_character = 0 < code < 0xD800 or 0xDFFF < code < 0x110000
        return chr(code) if is_character else found[0]

    return _ENTITY.sub(write, text)


def _write_value(schema: Any, root: Mapping[str, Any]) -> str:
    types = find_types(schema, root)
    if not types or "string" not in types:
        if types is None:
            return "text"
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return write_json({**definitions, **schema})
    choices = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if choices is None:
        return "text"
    return " | ".join(_quote(_as_text(choice)) for choice in choices)


def _as_text(choice: Any) -> str:
    text = choice if isinstance(choice, str) else json.dumps(choice)
    return f"{_CDATA}{text}{_CDATA_END}" if re.search(r"[<&\n]", text) else text


def _attribute(name: str) -> str:
    return f'"{escape(name, {chr(34): "&quot;"})}"'


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
