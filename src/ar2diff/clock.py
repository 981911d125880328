"""Time as an argument: only the command line reads the machine's clock, everything else is given one."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What a stage may ask about time."""

    def utc(self) -> datetime:
        """The wall time, with time zone UTC."""
        ...

    def seconds(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...


class SystemClock:
    """The machine's own clock."""

    def utc(self) -> datetime:
        """The wall time, with time zone UTC."""
        return datetime.now(UTC)

    def seconds(self) -> float:
        """Seconds on the monotonic clock."""
        return time.perf_counter()
