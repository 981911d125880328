"""Whether a constraint compiles in bounded time and memory: run as a program of its own, since it may not.

Reads {"kind": ..., "text": ..., "vocab_size": ...} from standard input and writes the fault to standard output, or nothing. It talks in
single bytes: a grammar's size does not depend on the model's vocabulary. Needs nothing but the grammar library.
"""

import json
import sys
from typing import Any

MAX_MEMORY_BYTES = 2**30
# Runs of white space are bounded, so that no model fills an answer with them; indented JSON still fits.
JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}", "lenient": False}


class ByteVocabulary:
    """Every byte as a token, and control tokens from 256 on; what the library asks of a tokenizer."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self, size: int) -> None:
        self.special_token_ids = range(256, max(257, size))
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(b"<%d>" % idx for idx in self.special_token_ids)]

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text's bytes."""
        return list(text)


def build_source(kind: str, text: str) -> str:
    """The constraint in the library's own form.

    Raises:
        ValueError: a schema that is no JSON object.
    """
    from llguidance import LLMatcher

    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def find_fault(matcher: Any) -> str:
    """Why a fresh matcher can match nothing; empty where it can."""
    matcher.compute_bitmask()
    lines = str(matcher.get_error()).strip().splitlines() if matcher.is_error() else [""]
    if lines[0].startswith("NoExtension"):
        return "nothing has this form"
    return lines[0][:200] or "the grammar library refuses it" if matcher.is_error() else ""


def main() -> None:
    """Check what standard input holds."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    _limit_memory()
    asked = json.load(sys.stdin)
    # Only a grammar may name tokens by their ids.
    size = asked["vocab_size"] if asked["kind"] == "lark" else 0
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary(size)))
    try:
        source = build_source(asked["kind"], asked["text"])
    except ValueError as error:
        print(str(error)[:200])
        return
    limits = LLParserLimits(verbose_errors=False)
    print(find_fault(LLMatcher(tokenizer, source, log_level=0, limits=limits)))


def _limit_memory() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


if __name__ == "__main__":
    main()
