"""Arguments of a call: read as JSON or as plain text, and fitted to the schema of the tool that is called."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]
"""The schema of each tool's arguments, by name."""


MAX_STEPS = 32
"""So many references and alternatives lie between an argument and its types at most."""


class Unfinished(Exception):  # noqa: N818 - more of the text may come
    """What looks like the end of a call lies within one of its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that fits its tool; the arguments are a JSON object."""

    name: str
    arguments: str


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at `start` (white space aside) and where it ends.

    Raises:
        ValueError: there is none, or an object has a key twice.
        Unfinished: the text ends within it.
    """
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise Unfinished from None
        raise
    except RecursionError:
        raise ValueError("nested too deeply") from None


def build_call(name: Any, arguments: Any, tools: Tools) -> Call:
    """A call with its values in the types of the schema.

    Raises:
        ValueError: no such tool, an unknown or missing parameter, a value of another type.
    """
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        raise ValueError("no call of a known tool")
    schema = tools[name]
    missing = set(schema.get("required") or ()) - arguments.keys()
    if missing or not all(is_parameter(key, schema) for key in arguments):
        raise ValueError("other parameters than the tool has")
    fitted = {key: _fit(value, find_parameter(key, schema), schema) for key, value in arguments.items()}
    written = json.dumps(fitted, ensure_ascii=False, allow_nan=False)
    written.encode()  # half a surrogate pair, which JSON can spell, is no text
    return Call(name=name, arguments=written)


def is_parameter(key: str, schema: Mapping[str, Any]) -> bool:
    """Whether a tool with this schema takes an argument of that name."""
    properties = schema.get("properties")
    return key in (properties or {}) or schema.get("additionalProperties", properties is None) is not False


def find_parameter(key: str, schema: Mapping[str, Any]) -> Any:
    """The schema of one argument; True where it says nothing."""
    found = (schema.get("properties") or {}).get(key, schema.get("additionalProperties"))
    return True if found is None else found


def read_text(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that plain text stands for: text where the schema takes nothing else that it could be.

    Raises:
        ValueError: it is none of the schema's types.
    """
    types = find_types(schema, root)
    if types == {"string"}:
        return text
    for parse in (_DECODER.decode, ast.literal_eval):  # templates write True and None as Python does
        try:
            value = json.loads(json.dumps(parse(text.strip()), allow_nan=False))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if not isinstance(value, str) and (types is None or _is_of(value, types)):
            return value
    if types is None or "string" in types:
        return text
    raise ValueError("a value of another type")


def find_types(
    schema: Any, root: Mapping[str, Any], depth: int = MAX_STEPS, seen: set[str] | None = None
) -> set[str] | None:
    """The JSON types that a schema allows at its top; None where it does not say, or says it too far away.

    Args:
        seen: references that were followed; another look at one adds nothing.
    """
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    if isinstance(named := schema.get("type"), str | list):
        return {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_TYPE_NAMES[type(value)] for value in values}
    options = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(options, list):
        found = [find_types(option, root, depth - 1, seen) for option in options]
        return None if None in found else set().union(*(types or () for types in found))
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return None
    is_new = reference not in seen
    seen.add(reference)
    return find_types(_resolve(reference, root), root, depth - 1, seen) if is_new else set()


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for name in filter(None, reference.removeprefix("#").split("/")):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _fit(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    types = find_types(schema, root)
    if types is None or _is_of(value, types):
        return value
    if isinstance(value, str):
        return read_text(value, schema, root)
    raise ValueError("a value of another type")


def _is_of(value: Any, types: set[str]) -> bool:
    name = _TYPE_NAMES[type(value)]
    is_whole = name == "integer" or (isinstance(value, float) and value.is_integer())
    return name in types or (name == "integer" and "number" in types) or (is_whole and "integer" in types)


_TYPE_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Line ends within strings are let through: models write them, and they can mean nothing else.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, strict=False)
