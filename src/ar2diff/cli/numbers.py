"""Options that take several numbers: `--steps 1,2,4`, or `--steps 1 --steps 2`."""

from collections.abc import Sequence
from typing import Annotated, get_args

from cyclopts import Parameter, Token


def split_numbers(kind: type, tokens: Sequence[Token]) -> tuple[int | float, ...]:
    """The numbers of every time that an option was given; raises ValueError with the part that is none."""
    number = get_args(kind)[0]
    return tuple(_parse(number, part) for token in tokens for part in token.value.split(","))


def _parse(number: type[int] | type[float], text: str) -> int | float:
    try:
        return number(text)
    except ValueError:
        wanted = "whole numbers" if number is int else "numbers"
        raise ValueError(f"'{text}' is none of the {wanted} that it takes, as in 1,2,4") from None


_AS_LIST = Parameter(converter=split_numbers, negative_iterable=())
Integers = Annotated[tuple[int, ...], _AS_LIST]
Floats = Annotated[tuple[float, ...], _AS_LIST]
