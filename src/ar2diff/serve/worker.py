"""The bridge to the engine: one thread that owns the model, a bounded queue in, outcomes out, nothing of asyncio.

The thread drives a `Scheduler`, the engine's, pass by pass and looks at cancellations between passes.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ar2diff.engine.generation import Pass
from ar2diff.engine.request import Request
from ar2diff.errors import Ar2diffError

State = Literal["loading", "ready", "draining", "dead", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an answer ended without being finished; `code` is a word for programs."""

    message: str
    code: str


Outcome = Pass | Failure
Deliver = Callable[[Outcome], None]


class Scheduler(Protocol):
    """What the worker needs of an engine; called from the worker's thread only."""

    @property
    def capacity(self) -> int:
        """Requests that may run together."""
        ...

    @property
    def kv_use(self) -> float:
        """The share of the KV memory in use; read from any thread."""
        ...

    def add(self, key: Hashable, request: Request) -> None:
        """Take a request in; at most `capacity` are in at a time. A refusal comes with the next step."""
        ...

    def step(self) -> Sequence[tuple[Hashable, Pass | Ar2diffError]]:
        """One forward for all; a finished or failed request has left."""
        ...

    def remove(self, key: Hashable) -> None:
        """Drop a running request and free its memory."""
        ...


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """A job that was not taken in: `reason` is queue_full or the worker's state."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Job:
    """One request on its way; `deliver` gets its outcomes, from the worker's thread."""

    def __init__(self, key: int, request: Request, deliver: Deliver) -> None:
        self.key, self.request, self.deliver = key, request, deliver
        self.is_started = False


class Worker:
    """The engine thread and its queue. Every method may be called from any thread.

    Args:
        load: makes the scheduler, in the engine thread; an `Ar2diffError` from it is kept in `fault`.
        max_waiting: jobs that wait at most, beyond those that the engine has a place for.

    Attributes:
        fault: what killed the engine, or None.
        on_change: called whenever the state changes, from any thread.
        on_death: called with `fault`, from the engine thread.
    """

    def __init__(self, load: Callable[[], Scheduler], *, max_waiting: int) -> None:
        self._load, self._max_waiting = load, max_waiting
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[Hashable, Job] = {}
        self._cancelled: set[Hashable] = set()
        self._next_key = 0
        self._state: State = "loading"
        self._scheduler: Scheduler | None = None
        self._capacity = 0
        self.fault: BaseException | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_death: Callable[[BaseException], object] = bool
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)

    @property
    def state(self) -> State:
        """loading, ready, draining, dead or stopped."""
        return self._state

    @property
    def num_waiting(self) -> int:
        """Jobs not yet started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Jobs on the engine."""
        return len(self._running)

    @property
    def max_jobs(self) -> int:
        """Jobs that may be here at once, on the engine or waiting for it."""
        return self._capacity + self._max_waiting

    @property
    def kv_use(self) -> float:
        """The share of the engine's KV memory in use; 0 until there is one."""
        return 0.0 if self._scheduler is None else self._scheduler.kv_use

    def start(self) -> None:
        """Load the model and begin to work, in the engine thread."""
        self._thread.start()

    def check_open(self, num_jobs: int = 1) -> None:
        """Whether so many jobs that belong together would be taken now.

        Raises:
            Refusal: no place in the queue for all of them, or the engine takes nothing.
        """
        if self._state != "ready":
            raise Refusal(self._state)
        if len(self._running) + len(self._waiting) + num_jobs > self.max_jobs:
            raise Refusal("queue_full")

    def submit(self, asked: list[tuple[Request, Deliver]]) -> list[Job]:
        """Queue requests that belong together; all or none are taken.

        Raises:
            Refusal: no place in the queue, or the engine takes nothing.
        """
        with self._lock:
            self.check_open(len(asked))
            jobs = [Job(self._next_key + idx, request, deliver) for idx, (request, deliver) in enumerate(asked)]
            self._next_key += len(jobs)
            self._waiting += jobs
            self._lock.notify_all()
            return jobs

    def cancel(self, job: Job) -> None:
        """Drop a job: at once while it waits, else before the next pass."""
        with self._lock:
            if job.key in self._running:
                self._cancelled.add(job.key)
            elif job in self._waiting:
                self._waiting.remove(job)
            self._lock.notify_all()

    def drain(self) -> None:
        """Take nothing more in; what is queued is still answered."""
        with self._lock:
            if self._state in ("loading", "ready"):
                self._state = "draining"
        self.on_change()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        with self._lock:
            return not self._waiting and not self._running

    def stop(self) -> None:
        """End the thread after the pass underway; jobs that are left fail with `shutting_down`."""
        with self._lock:
            if self._state != "dead":
                self._state = "stopped"
            self._fail_all(Failure(message="the server is shutting down", code="shutting_down"))
            self._lock.notify_all()
        self.on_change()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            self._scheduler = scheduler = self._load()
            self._capacity = scheduler.capacity
            with self._lock:
                if self._state == "loading":
                    self._state = "ready"
            self.on_change()
            while self._admit(scheduler):
                self._pass_on(scheduler.step())
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._die(error)

    def _admit(self, scheduler: Scheduler) -> bool:
        """Drop the cancelled, start the waiting; blocks while there is nothing to do. False once stopped."""
        with self._lock:
            while True:
                for key in self._cancelled & self._running.keys():
                    scheduler.remove(key)
                    del self._running[key]
                self._cancelled.clear()
                if self._state == "stopped":
                    return False
                while self._waiting and len(self._running) < scheduler.capacity:
                    job = self._waiting.popleft()
                    job.is_started = True
                    self._running[job.key] = job
                    scheduler.add(job.key, job.request)
                if self._running:
                    return True
                self._lock.wait()

    def _pass_on(self, results: Sequence[tuple[Hashable, Pass | Ar2diffError]]) -> None:
        with self._lock:
            for key, result in results:
                job = self._running.get(key)
                if job is None:
                    continue
                if isinstance(result, Ar2diffError) or result.generation is not None:
                    del self._running[key]
                if key not in self._cancelled:
                    job.deliver(_as_outcome(result))

    def _die(self, error: BaseException) -> None:
        with self._lock:
            self.fault, self._state = error, "dead"
            self._fail_all(Failure(message="the engine has failed", code="engine_dead"))
        self.on_death(error)
        self.on_change()

    def _fail_all(self, failure: Failure) -> None:
        left = [*self._running.values(), *self._waiting]
        self._waiting.clear()
        self._cancelled.clear()
        self._running.clear()
        for job in left:
            job.deliver(failure)


def _as_outcome(result: Pass | Ar2diffError) -> Outcome:
    if isinstance(result, Ar2diffError):
        return Failure(message=result.one_line(), code="generation_failed")
    return result
