"""Text as it is compared: compatibility forms, letter case, punctuation and spacing make no difference."""

import re
import unicodedata
from collections.abc import Iterator, Sequence

WORD = re.compile(r"[^\W_]+")
DIGITS = re.compile(r"\d+")
OPERATORS = re.compile(r"[-+*/%<>=^|~]")
# LaTeX that changes how a formula looks and not what it says.
_STYLE_WORDS = (
    "left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|quad|qquad|text(?:rm|bf|it)?|math(?:rm|bf|it|sf)|mbox"
)
LATEX_STYLE = re.compile(rf"\\(?:{_STYLE_WORDS})(?![A-Za-z])")
LATEX_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")


def split_words(text: str) -> list[str]:
    """The NFKC, casefolded runs of letters and digits of `text`: full-width forms and ligatures become plain.

    LaTeX commands for looks, such as `\\left` and `\\text`, are no words, and all fractions are `frac`.
    """
    if "\\" in text:
        text = LATEX_FRACTION.sub(r"\\frac", LATEX_STYLE.sub(" ", text))
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        # Casefolding can undo the normal form of a few letters, so it is restored after it.
        return WORD.findall(unicodedata.normalize("NFKC", text.casefold()))
    return WORD.findall(text.lower())


def normalize_text(text: str) -> str:
    """`split_words` joined by single spaces."""
    return " ".join(split_words(text))


def read_signs(text: str) -> str:
    """Operators and other symbols of `text` in their order, without punctuation.

    They set `3 - 4` and `3 + 4` apart, whose words are equal.
    """
    if text.isascii():
        return "".join(OPERATORS.findall(text))
    # The minus sign of typesetting is the one of keyboards.
    text = unicodedata.normalize("NFKC", text).replace("\N{MINUS SIGN}", "-")
    return "".join(c for c in text if OPERATORS.match(c) or (not c.isascii() and unicodedata.category(c)[0] == "S"))


def mask_numbers(words: Sequence[str]) -> list[str]:
    """The words with every run of digits as `0`, so that a renumbered copy reads the same."""
    return mask_text(" ".join(words)).split()


def mask_text(text: str) -> str:
    """`mask_numbers` of words that are joined by spaces."""
    return DIGITS.sub("0", text)


def iterate_grams(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """All runs of `size` words, in order."""
    return zip(*[words[start:] for start in range(size)], strict=False)
