"""Memory that torch frees on the CPU is kept for the next tensor instead of going back to the system.

glibc maps every large tensor anew and unmaps it when it is freed, so each step faults its pages in again; on two
cores that is a quarter of a training step. Nothing is changed where the C library is another one.
"""

import ctypes
import sys

# From glibc's malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX.
_SETTINGS = ((-1, 2**31 - 1), (-2, 256 * 2**20), (-4, 0))


def keep_freed_memory() -> bool:
    """Apply the settings to this process; returns whether the C library took them."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(name, value) == 1 for name, value in _SETTINGS)
