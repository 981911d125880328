"""Numbers on the command line: whole ones in digits alone, and options that take several, as `--steps 1,2,4`."""

from collections.abc import Sequence
from typing import Annotated, Any, get_args

from cyclopts import Parameter, Token, convert

_WANTED = {
    int: "no whole number; write it in digits alone, such as 100",
    float: "no number; write it such as 0.9",
}


def read_value(kind: Any, tokens: Sequence[Token]) -> Any:
    """What an option was given, as its type: whole numbers read strictly, all else as cyclopts does.

    cyclopts alone would round: 1.5 steps were 2.

    Raises:
        ValueError: a whole number has a fraction, an exponent or no digits.
    """
    return _parse(int, tokens[0].value) if kind is int else convert(kind, tokens)


def split_numbers(kind: type, tokens: Sequence[Token]) -> tuple[int | float, ...]:
    """The numbers of every time that an option was given; raises ValueError with the part that is none."""
    number = get_args(kind)[0]
    return tuple(_parse(number, part) for token in tokens for part in token.value.split(","))


def _parse(number: type[int] | type[float], text: str) -> int | float:
    try:
        return number(text)
    except ValueError:
        raise ValueError(f'"{text}" is {_WANTED[number]}') from None


STRICT = Parameter(converter=read_value)
_AS_LIST = Parameter(converter=split_numbers, negative_iterable=())
Integers = Annotated[tuple[int, ...], _AS_LIST]
Floats = Annotated[tuple[float, ...], _AS_LIST]
