"""JSON as the standard means it: UTF-8, no doubled keys, no NaN, nothing that overflows, bounded in depth."""

import json
import math
from typing import Any

from ar2diff.serve.problems import ApiError, invalid

MAX_DEPTH = 64
MAX_INT_DIGITS = 20


def parse_json(body: bytes) -> Any:
    """The value that `body` holds.

    Raises:
        ApiError: status 400, naming what is wrong.
    """
    try:
        text = body.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except UnicodeDecodeError:
        raise _bad("the body is not UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _bad(f"the body is not JSON: {error.msg} at {where}" if body else "the body is empty") from None
    _check_tree(value)
    return value


def _check_tree(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                _check_text(item)
        if not below:
            return
        level = below
    raise _too_deep()


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _bad("a text holds half of a surrogate pair") from None


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        doubled = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        _check_text(doubled)
        raise _bad(f"the key {doubled[:64]!r} occurs twice in one object")
    return content


def _refuse_constant(text: str) -> Any:
    raise _bad(f"{text} is no JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _bad("a number is too large")
    return number


def _bounded_int(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:
        raise _bad("an integer has too many digits")
    return int(text)


def _too_deep() -> ApiError:
    return _bad(f"the body nests deeper than {MAX_DEPTH} levels")


def _bad(message: str) -> ApiError:
    return invalid(message, code="invalid_json")
