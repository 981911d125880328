"""`ar2diff version`: what is installed, to be pasted into a bug report."""

import platform
from importlib import metadata

from ar2diff import __version__

LIBRARIES = ("torch", "safetensors", "tokenizers", "huggingface_hub", "numpy", "pyarrow")


def version() -> None:
    """Print the versions of ar2diff, Python and the libraries that shape results."""
    print(f"ar2diff {__version__}")
    print(f"python {platform.python_version()} {platform.system()} {platform.machine()}")
    for library in LIBRARIES:
        print(f"{library} {_installed_version(library)}")


def _installed_version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "not installed"
