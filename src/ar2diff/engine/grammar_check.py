"""Whether a constraint compiles in bounded time and memory: run as a program of its own, since it may not.

Reads {"source": ..., "vocab_size": ...} from standard input and writes the fault to standard output, or nothing. It
talks in single bytes: a grammar's size does not depend on the model's vocabulary. Needs only the grammar library.
"""

import json
import sys
from typing import Any

MAX_MEMORY_BYTES = 2**30
MAX_CPU_S = 2


class ByteVocabulary:
    """Every byte as a token, and control tokens from 256 on; what the library asks of a tokenizer."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self, size: int) -> None:
        self.special_token_ids = range(256, max(257, size))
        self.tokens = [*(bytes([byte]) for byte in range(256)), *(b"<%d>" % idx for idx in self.special_token_ids)]

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text's bytes."""
        return list(text)


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

    _limit()
    asked = json.load(sys.stdin)
    tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary(asked["vocab_size"])))
    limits = LLParserLimits(verbose_errors=False)
    print(find_fault(LLMatcher(tokenizer, asked["source"], log_level=0, limits=limits)))


def _limit() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        # Of the processor, not of the clock: what is refused must not depend on what else runs.
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))


if __name__ == "__main__":
    main()
