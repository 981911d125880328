"""Parts made by this process or by several workers; they come back in order and are the same either way.

Workers are started afresh (`spawn`), so nothing of this process leaks into them and any platform has them.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ar2diff.data.config import DataConfig
from ar2diff.data.decontaminate import Decontaminator
from ar2diff.data.evaluation_items import build_blocklist, load_problems
from ar2diff.data.parts import PartMaker, PartWork
from ar2diff.errors import ConfigError, RunError
from ar2diff.tokenizer import Tokenizer

# Parts that wait in memory or are being made beyond one for each worker.
AHEAD = 1


class Pool(Protocol):
    """Makes the parts that are not there yet."""

    def finish(self, works: Iterator[PartWork]) -> Iterator[Path]:
        """The path of each part, in the order of `works`; finished parts are not made again."""
        ...


class LocalPool:
    """Makes each part when it is asked for, in this process."""

    def __init__(self, maker: PartMaker, folder: Path) -> None:
        self._maker = maker
        self._folder = folder

    def finish(self, works: Iterator[PartWork]) -> Iterator[Path]:
        """As `Pool.finish`."""
        for work in works:
            path = self._folder / work.name
            yield path if path.is_file() else self._maker.make(work)


class WorkerPool:
    """Makes parts in other processes, a few ahead of the one that is asked for."""

    def __init__(self, executor: ProcessPoolExecutor, folder: Path, num_workers: int) -> None:
        self._executor = executor
        self._folder = folder
        self._room = num_workers + AHEAD

    def finish(self, works: Iterator[PartWork]) -> Iterator[Path]:
        """As `Pool.finish`.

        Raises:
            RunError: a worker was killed.
        """
        waiting: deque[Future[Path] | Path] = deque()
        try:
            for work in works:
                path = self._folder / work.name
                waiting.append(path if path.is_file() else self._executor.submit(_make, work))
                if len(waiting) > self._room:
                    yield _await(waiting.popleft())
            while waiting:
                yield _await(waiting.popleft())
        except BrokenProcessPool:
            _stop_feeding(self._executor)
            fix = "Run the same command again, it goes on; take fewer workers if memory ran out"
            raise RunError("a worker was killed", fix=fix) from None
        finally:
            for future in waiting:
                if isinstance(future, Future):
                    future.cancel()


def _stop_feeding(executor: ProcessPoolExecutor) -> None:
    # Before 3.11.5 a broken pool goes on writing into a pipe that no worker reads, and its end waits for ever
    # (CPython issue 94777).
    if sys.version_info < (3, 11, 5):
        executor._call_queue._reader.close()  # type: ignore[attr-defined]


def _await(future: Future[Path] | Path) -> Path:
    return future if isinstance(future, Path) else future.result()


@contextmanager
def open_pool(
    config: DataConfig,
    tokenizer: Tokenizer,
    blocklist: Decontaminator,
    folder: Path,
    *,
    fetched: Mapping[str, Path],
    num_workers: int,
) -> Iterator[Pool]:
    """A pool that writes its parts into `folder`; one worker means this process.

    Raises:
        ConfigError: there is no worker.
    """
    if num_workers < 1:
        raise ConfigError("no workers", given=num_workers, fix="Take at least one")
    if num_workers == 1:
        yield LocalPool(PartMaker(tokenizer, blocklist, config.max_document_len, folder), folder)
        return
    stored = folder / "tokenizer"
    stored.mkdir(exist_ok=True)
    tokenizer.save(stored)
    executor = ProcessPoolExecutor(
        max_workers=num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(config, stored, folder, dict(fetched)),
    )
    try:
        yield WorkerPool(executor, folder, num_workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


# The one part maker of a worker process.
_makers: list[PartMaker] = []


def _start_worker(config: DataConfig, stored: Path, folder: Path, fetched: dict[str, Path]) -> None:
    # Ctrl-C goes to the whole group; the parent decides what happens to its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    blocklist = build_blocklist(config, [load_problems(share, fetched) for share in config.evaluation])
    _makers.append(PartMaker(Tokenizer.from_folder(stored), blocklist, config.max_document_len, folder))


def _end_with_parent() -> None:
    """A killed parent closes no queue, and its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(work: PartWork) -> Path:
    return _makers[0].make(work)
