"""The `ar2diff` command: parses the line, calls one command, and turns what goes wrong into one line.

Exit codes: 0 done, 1 our own mistake (a traceback), 2 a wrong flag or another problem for the user, 130 Ctrl-C,
141 the reader of our output went away. `audit` has codes of its own: see its help.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from cyclopts import App, CycloptsError, UnusedCliTokensError

from ar2diff import __version__
from ar2diff.cli.numbers import STRICT
from ar2diff.cli.table import COMMANDS
from ar2diff.errors import Ar2diffError, ConfigError

USAGE_EXIT_CODE = 2
AUDIT_USAGE_EXIT_CODE = 3
INTERRUPT_EXIT_CODE = 130
BROKEN_PIPE_EXIT_CODE = 141


def build_app() -> App:
    """The parser with every command of the table; it raises instead of printing errors and exiting."""
    built = App(
        name="ar2diff",
        help="Turn an autoregressive language model into a block-diffusion one, decode, measure and prove it.",
        version=f"ar2diff {__version__}",
        version_flags=["--version"],
        default_parameter=STRICT,
        print_error=False,
        exit_on_error=False,
        help_on_error=False,
        verbose=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, command in COMMANDS.items():
        named = App(name=name, version_flags=[])  # a nameless one shows the running program in its usage line
        named.default(command)
        built.command(named)
    return built


app = build_app()


def run(tokens: Sequence[str], *, parser: App = app) -> int:
    """Run one command line and return its exit code; an error leaves exactly one line on standard error.

    Args:
        tokens: the words after `ar2diff`.
        parser: the commands to choose from.
    """
    try:
        _check_words(tokens)
        result = parser(list(tokens))
        sys.stdout.flush()
    except CycloptsError as error:
        # An audit's own answer may be 2: evidence missing.
        return _fail(_explain(error), AUDIT_USAGE_EXIT_CODE if list(tokens[:1]) == ["audit"] else USAGE_EXIT_CODE)
    except Ar2diffError as error:
        return _fail(error.one_line(), error.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped by Ctrl-C", INTERRUPT_EXIT_CODE)
    except BrokenPipeError:
        _silence_stdout()
        return BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        return _fail(_describe(error), USAGE_EXIT_CODE)
    return result if isinstance(result, int) else 0


def main() -> NoReturn:
    """The entry point: run the process's own command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def _fail(message: str, exit_code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


def _explain(error: CycloptsError) -> str:
    """The parser's own words, but for words that belong to nothing: a list option takes one at a time."""
    if not isinstance(error, UnusedCliTokensError) or not error.unused_tokens:
        return f"{error}"
    words = " ".join(error.unused_tokens)
    return f"too many words (given: {words}); write an option that takes several values once for each of them"


def _check_words(tokens: Sequence[str]) -> None:
    # Paths and prompts end in JSON and in the ledger, which hold Unicode alone.
    for word in tokens:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError("not valid UTF-8 on the command line", given=ascii(word)) from None


def _describe(error: OSError) -> str:
    """What the operating system refused, for faults that no command puts into better words."""
    where = "" if error.filename is None else f" (given: {error.filename})"
    return f"{error.strerror or error}{where}"


def _silence_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush cannot fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
