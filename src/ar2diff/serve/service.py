"""Everything one server has: its model and engine thread, limits, keys, log and metrics."""

from collections.abc import Callable

from ar2diff.clock import Clock
from ar2diff.engine.constraint import Constraint
from ar2diff.errors import RequestError
from ar2diff.serve.keys import Keys
from ar2diff.serve.limits import Limits
from ar2diff.serve.log import JsonLog
from ar2diff.serve.metrics import Metrics
from ar2diff.serve.problems import ApiError, invalid, unavailable
from ar2diff.serve.served import ModelEngine, ServedModel
from ar2diff.serve.worker import Scheduler, Worker

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Service:
    """One served model.

    Args:
        name: what requests call the model.
        load_engine: loads it; called in the engine thread.
        draw_seed: a fresh seed for a request without one.
        new_id: a fresh request id.
        required_root: the tensor root that the stored model must have, or None.
        allowed_hosts: values of the Host header that are answered, without port; None answers all.
        request_log: gets the digests of every answer; None keeps none.

    Attributes:
        served: the model, once it is loaded.
    """

    def __init__(
        self,
        name: str,
        load_engine: Callable[[], ModelEngine],
        *,
        clock: Clock,
        log: JsonLog,
        draw_seed: Callable[[], int],
        new_id: Callable[[], str],
        keys: Keys | None = None,
        limits: Limits | None = None,
        required_root: str | None = None,
        allowed_hosts: frozenset[str] | None = LOOPBACK_HOSTS,
        request_log: JsonLog | None = None,
    ) -> None:
        self.name, self.clock, self.log = name, clock, log
        self.draw_seed, self.new_id = draw_seed, new_id
        self.keys, self.limits = keys or Keys([]), limits or Limits()
        self.allowed_hosts, self.request_log = allowed_hosts, request_log
        self.metrics = Metrics()
        self.served: ServedModel | None = None
        self._compile: Callable[[Constraint], object] | None = None
        self._load_engine, self._required_root = load_engine, required_root
        self.worker = Worker(self._load, max_waiting=self.limits.max_waiting)
        self.worker.on_death = lambda error: log.fault("engine_dead", error)
        self.metrics.watch("ar2diff_waiting", "Choices that wait.", lambda: self.worker.num_waiting)
        self.metrics.watch("ar2diff_running", "Choices that run.", lambda: self.worker.num_running)
        self.metrics.watch("ar2diff_kv_use", "Share of the KV memory in use.", lambda: self.worker.kv_use)
        self.metrics.watch("ar2diff_lost_log_lines", "Log lines that could not be written.", lambda: log.lost)

    def find(self, name: str) -> ServedModel:
        """The model of that name.

        Raises:
            ApiError: 404, or 503 while it loads.
        """
        if self.served is None:
            raise unavailable("the model is loading", "server_loading")
        if name != self.served.name:
            raise ApiError(404, "there is no model of that name", code="model_not_found", param="model")
        return self.served

    def compile(self, constraint: Constraint | None, *, param: str) -> None:
        """Prepare the form of an answer, so that the engine thread finds it ready; may take seconds.

        Args:
            param: the request field that asks for the form.

        Raises:
            ApiError: status 400: the form is wrong or too complex.
        """
        if constraint is None or self._compile is None:
            return
        try:
            self._compile(constraint)
        except RequestError as error:
            raise invalid(error.one_line(), param=param) from None

    def _load(self) -> Scheduler:
        engine = self._load_engine()
        grammars = getattr(engine, "grammars", None)
        self._compile = None if grammars is None else grammars.compile
        created = int(self.clock.utc().timestamp())
        self.served = ServedModel.measure(
            self.name,
            engine.loaded,
            created=created,
            required_root=self._required_root,
            precision=getattr(engine, "precision_reason", "unknown"),
        )
        return engine.scheduler
