"""The errors a user can meet: what is wrong, what was given, what to do.

Everything a user may cause is an `Ar2diffError`; the command line prints it as one line and exits
with `exit_code`. An `AssertionError` is always our own mistake.
"""

from typing import ClassVar


class Ar2diffError(Exception):
    """A problem for the user to solve, printed as `problem (given: ...). fix`.

    Args:
        problem: what is wrong, one clause without a final full stop.
        given: what was found instead of the right thing; shown with `repr` unless it is a `str`.
        fix: what to do about it, one sentence without a final full stop.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, problem: str, *, given: object = None, fix: str | None = None) -> None:
        self.problem = problem
        self.given = given
        self.fix = fix
        super().__init__(self.one_line())

    def one_line(self) -> str:
        """The whole message on one line, as the command line prints it."""
        text = self.problem
        if self.given is not None:
            shown = self.given if isinstance(self.given, str) else repr(self.given)
            text += f" (given: {shown})"
        if self.fix:
            text += f". {self.fix}"
        return " ".join(text.split())


class ConfigError(Ar2diffError):
    """A setting, flag or recipe key that is unknown, of the wrong type or out of range."""


class SourceError(Ar2diffError):
    """A download or a source file that is missing, unreachable or not what was pinned."""


class DataError(Ar2diffError):
    """A training or evaluation file that cannot be read as what it claims to be."""


class ModelError(Ar2diffError):
    """Weights or a config that do not fit the declared architecture."""


class UnsupportedModelError(ModelError):
    """An architecture or feature that this version does not implement."""


class CheckpointError(Ar2diffError):
    """A checkpoint that is incomplete, corrupt or belongs to another run."""


class RunError(Ar2diffError):
    """A run directory that is in use, of another run, or in the wrong state."""


class LedgerError(Ar2diffError):
    """A ledger whose chain, sequence or last line does not hold."""


class SpaceError(Ar2diffError):
    """Not enough free space for what is about to be written."""


class TrainingError(Ar2diffError):
    """Training that cannot go on: a loss or gradient that is not finite."""


class RankError(Ar2diffError):
    """This process of a parallel job ends because another one has refused, whose message is the job's."""


class RequestError(Ar2diffError):
    """A generation request that cannot be served as asked."""


class ContextOverflowError(RequestError):
    """A prompt that leaves no room for an answer within the context."""


class GenerationError(Ar2diffError):
    """A generation that failed underway, such as on logits that are not finite."""


class BuildError(Ar2diffError):
    """Code that cannot be compiled on this machine."""
