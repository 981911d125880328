"""Which classes a process has unpickled: an interpreter's audit hook sees every one, whoever asks for it.

A pickle that names no class holds plain values and does nothing. Objects that Python's own worker processes, and the
ranks of a training, send each other are counted apart: they come from this program, not from a file.
Format: the `pickle.find_class` event, PEP 578.
"""

import sys
from typing import Any

_IPC_MODULES = ("multiprocessing.", "concurrent.futures.")
# Where torch reads what another rank sent; files are read elsewhere.
_RANKS = ("torch.distributed.distributed_c10d", "_tensor_to_object")
_seen: list[str] = []
_is_watching = False


class UnpicklingWatch:
    """Sees what this process unpickles from now on."""

    def __init__(self) -> None:
        global _is_watching  # noqa: PLW0603 - an audit hook cannot be taken away, so there is one for the process
        if not _is_watching:
            sys.addaudithook(_hear)
            _is_watching = True
        self._first = len(_seen)

    def list_classes(self) -> list[str]:
        """`module.name` of each class that a pickle has asked for, sorted, without those between processes."""
        return sorted(set(_seen[self._first :]))


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and not _is_between_processes():
        _seen.append(f"{arguments[0]}.{arguments[1]}")


def _is_between_processes() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_IPC_MODULES) or (module, frame.f_code.co_name) == _RANKS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
