"""Constraints at work: compiled once for a model's vocabulary, then followed token by token.

The grammar library (llguidance) comes with the extra `constrained` and is loaded with the first constraint.
Shape letters: V vocabulary.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ar2diff.engine import grammar_check
from ar2diff.engine.constraint import JSON_OPTIONS, Constraint
from ar2diff.errors import GenerationError, RequestError
from ar2diff.tokenizer import Tokenizer

# The child process limits itself to 2 s of the processor; this is for a machine too busy to give it those.
MAX_WAIT_S = 20.0


class Automaton:
    """Where one answer stands in its form. Only settled tokens move it, never an end of turn.

    Args:
        matcher: the library's state machine, this automaton's own.
        end_ids: ids that end a turn.
    """

    def __init__(self, matcher: Any, *, end_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher, self._end_ids, self._vocab_size = matcher, list(end_ids), vocab_size

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return bool(self._matcher.is_accepting() and self._matcher.is_stopped())

    def allowed(self) -> Tensor:
        """Which ids may come next, boolean (V,); end ids only where the form is complete.

        Raises:
            GenerationError: the form has become too complex to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise dead_end()
        mask = np.unpackbits(bits, bitorder="little", count=min(self._vocab_size, 8 * len(bits)))
        allowed_V = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed_V[: len(mask)] = torch.from_numpy(mask).bool()
        allowed_V[self._end_ids] = bool(self._matcher.is_accepting())
        return allowed_V

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these ids may follow in this order."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def advance(self, token_id: int) -> None:
        """Take in the next token of the answer, one that is allowed.

        Raises:
            GenerationError: the form has become too complex to follow, or no token spells what it wants here: the
                library's masks then allow what it does not take.
        """
        if not self._matcher.consume_token(token_id):
            raise dead_end()

    def fork(self) -> "Automaton":
        """A copy that goes its own way."""
        return Automaton(self._matcher.deep_copy(), end_ids=self._end_ids, vocab_size=self._vocab_size)

    def look_ahead(self, token_ids: Sequence[int]) -> list[Tensor]:
        """What may come next now and after each of these ids; the list ends early where one may not follow.

        Raises:
            GenerationError: as `allowed`, of what comes next now.
        """
        ahead = self.fork()
        masks = [ahead.allowed()]
        with suppress(GenerationError):
            for token_id in token_ids:
                if token_id in self._end_ids or not masks[-1][token_id]:
                    break
                ahead.advance(token_id)
                masks.append(ahead.allowed())
        return masks


class Grammar:
    """A compiled constraint; any number of answers may follow it."""

    def __init__(self, matcher: Any, *, end_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher, self._end_ids, self._vocab_size = matcher, end_ids, vocab_size
        self._lock = threading.Lock()

    def start(self) -> Automaton:
        """An automaton at the start of an answer."""
        with self._lock:
            matcher = self._matcher.deep_copy()
        return Automaton(matcher, end_ids=self._end_ids, vocab_size=self._vocab_size)


class GrammarCompiler:
    """Compiles constraints for one vocabulary and keeps the latest; safe to share between threads.

    Args:
        vocab_size: of the model; ids that the tokenizer does not know are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compile_once = lru_cache(maxsize=64)(self._compile)

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint, at once where it was asked for lately.

        Raises:
            RequestError: it is wrong, unsupported, has no solution, or takes over 2 s of the processor or
                1 GiB to compile; or the grammar library is not installed.
        """
        return self._compile_once(constraint)

    def _compile(self, constraint: Constraint) -> Grammar:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            fix = "Install the extra: pip install 'ar2diff[constrained]'"
            raise RequestError("constrained output needs the package llguidance", fix=fix) from None
        source = _build_source(constraint)
        # Only a grammar names tokens by their ids.
        vocab_size = self._tokenizer.max_token_id + 1 if constraint.kind == "lark" else 0
        _raise_fault(constraint, _check_elsewhere(source, vocab_size))
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        _raise_fault(constraint, grammar_check.find_fault(matcher))
        return Grammar(matcher, end_ids=self._tokenizer.eos_token_ids, vocab_size=self._vocab_size)

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)), eos_token=[*self._tokenizer.eos_token_ids])


class _Vocabulary:
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_ids[0], None
        self.tokens = [tokenizer.token_bytes(idx) for idx in range(tokenizer.max_token_id + 1)]
        self.special_token_ids = sorted({*tokenizer.special_ids, *tokenizer.eos_token_ids})

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", errors="replace"))


def dead_end() -> GenerationError:
    """The error of an answer that cannot go on under its form, though the form is not complete."""
    fix = "Ask for a simpler form, or one that the model's tokens can spell"
    return GenerationError("the constraint cannot be followed any further", fix=fix)


def _build_source(constraint: Constraint) -> str:
    """The constraint in the library's own form, not compiled yet."""
    from llguidance import LLMatcher

    if constraint.kind == "json_schema":
        try:
            return LLMatcher.grammar_from_json_schema(constraint.text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        except ValueError as error:  # no JSON object, or nested too deeply
            raise RequestError(f"the json_schema cannot be used: {str(error)[:200]}") from None
    builders = {"regex": LLMatcher.grammar_from_regex, "lark": LLMatcher.grammar_from_lark}
    return builders[constraint.kind](constraint.text)


def _check_elsewhere(source: str, vocab_size: int) -> str:
    """What is wrong with a grammar, found by compiling it in a process that may be killed."""
    # -P: the engine's own modules must not stand in for the standard library's.
    command = [sys.executable, "-P", str(Path(grammar_check.__file__))]
    asked = json.dumps({"source": source, "vocab_size": vocab_size})
    try:
        done = subprocess.run(command, input=asked.encode(), capture_output=True, timeout=MAX_WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0:
        return f"it is too complex: compiling takes more than {grammar_check.MAX_CPU_S} s or 1 GiB"
    return done.stdout.decode(errors="replace").strip()


def _raise_fault(constraint: Constraint, fault: str) -> None:
    if fault:
        raise RequestError(f"the {constraint.kind} cannot be used: {fault}")
