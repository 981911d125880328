"""One JSON object a line, without the text of prompts and answers. A full disk never stops an answer."""

import json
import logging
import traceback
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from ar2diff.clock import Clock


class JsonLog:
    """Writes log lines; `lost` counts those that could not be written."""

    def __init__(self, write: Callable[[str], object], clock: Clock) -> None:
        self._write, self._clock = write, clock
        self.lost = 0

    def event(self, name: str, **fields: Any) -> None:
        """One line: the time, the event's name, and its fields."""
        line = {"time": self._clock.utc().isoformat(timespec="milliseconds"), "event": name, **fields}
        try:
            self._write(json.dumps(line, default=str) + "\n")
        except (OSError, ValueError):  # a full disk, a closed pipe
            self.lost += 1

    def fault(self, name: str, error: BaseException, **fields: Any) -> None:
        """A line for a mistake of ours: its kind and where it was, not its message, which may quote a prompt."""
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        places = [f"{frame.filename}:{frame.lineno}" for frame in frames]
        self.event(name, **fields, fault=type(error).__name__, at=places)


class LibraryLog(logging.Handler):
    """Turns a library's warnings into lines of a `JsonLog`."""

    def __init__(self, log: JsonLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    @override
    def emit(self, record: logging.LogRecord) -> None:
        fault = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        self._log.event("library", logger=record.name, level=record.levelname, text=record.getMessage(), fault=fault)
