"""Sources without files: a generator library at an exact version makes the items anew from a seed."""

from importlib.metadata import PackageNotFoundError, version

from ar2diff.errors import SourceError
from ar2diff.sources.receipt import Receipt
from ar2diff.sources.spec import ProceduralSource


def check_procedural(source: ProceduralSource) -> Receipt:
    """A receipt without files, once the installed generator is the pinned one.

    Raises:
        SourceError: the library is absent or of another version, which may generate other items.
    """
    try:
        installed = version(source.library)
    except PackageNotFoundError:
        installed = "not installed"
    if installed != source.version:
        raise SourceError(
            f"{source} needs {source.library}=={source.version}",
            given=installed,
            fix=f"Install {source.library}=={source.version}, or pin the installed version",
        )
    return Receipt(source=str(source), kind="procedural", revision=source.version)
