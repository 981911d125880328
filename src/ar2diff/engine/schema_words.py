"""Which words a JSON schema uses: one that no edition of JSON Schema knows would be dropped in silence.

The standard takes an unknown keyword for a remark. For an answer that must have a form that is no help: a misspelled
`minimumm` would bind nothing. So it is an error that names the word and its place, as in the strict mode of OpenAI.
Known words that the grammar library cannot keep are that library's errors. Names that begin with `x-` are remarks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ar2diff.errors import RequestError

# Where schemas stand inside a schema, from draft 4 to 2020-12. A word may hold a schema, a list or a map of them.
_ONE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_LISTS = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_MAPS = frozenset(["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"])
_VALUES = frozenset(
    [
        "$anchor",
        "$comment",
        "$dynamicAnchor",
        "$dynamicRef",
        "$id",
        "$recursiveAnchor",
        "$recursiveRef",
        "$ref",
        "$schema",
        "$vocabulary",
        "const",
        "contentEncoding",
        "contentMediaType",
        "default",
        "dependentRequired",
        "deprecated",
        "description",
        "enum",
        "examples",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "id",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "readOnly",
        "required",
        "title",
        "type",
        "uniqueItems",
        "writeOnly",
    ]
)
# Remarks of OpenAPI that generators of schemas write; its `nullable` is none, since it changes what is valid.
_REMARKS = frozenset(["discriminator", "example", "externalDocs", "xml"])
# A place is its parent and a name, so that a long name is held once however much lies below it.
_Place = tuple[Any, ...]
_KNOWN = _ONE | _LISTS | _MAPS | _VALUES | _REMARKS


def check_words(schema: Any, where: str = "the json_schema") -> None:
    """Refuse a schema with a word that no edition of JSON Schema (draft 4 to 2020-12) knows.

    Args:
        where: what the schema is, for the error.

    Raises:
        RequestError: names the word and its place, as a JSON pointer.
    """
    open_schemas: list[tuple[_Place, Any]] = [((), schema)]
    while open_schemas:
        place, one = open_schemas.pop()
        if not isinstance(one, Mapping):
            continue
        for word, value in one.items():
            if word not in _KNOWN and not str(word).startswith("x-"):
                raise RequestError(
                    f"{where} cannot be used: unknown keyword {str(word)[:80]!r} at {_write_pointer(place)}",
                    fix="Correct it or leave it out; it would bind nothing",
                )
            open_schemas += _find_inner((place, word), word, value)


def _find_inner(place: _Place, word: str, value: Any) -> Iterator[tuple[_Place, Any]]:
    if word in _MAPS and isinstance(value, Mapping):
        yield from (((place, name), inner) for name, inner in value.items())
    elif word in _LISTS and isinstance(value, list):
        yield from (((place, idx), inner) for idx, inner in enumerate(value))
    elif word in _ONE:
        yield place, value


def _write_pointer(place: _Place) -> str:
    names = list[str]()
    while place:
        place, name = place
        names.append(str(name)[:80].replace("~", "~0").replace("/", "~1"))
    names = names if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    pointer = "".join(f"/{name}" for name in reversed(names))
    return (pointer if len(pointer) <= 160 else f"{pointer[:80]}...{pointer[-70:]}") or "its root"
