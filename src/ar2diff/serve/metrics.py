"""What a monitoring system may read of a server, in the Prometheus text format."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from ar2diff.engine.generation import Generation

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_TOKEN_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_SHARES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)


class Metrics:
    """Counters and histograms of one server; its own registry, so that servers in one interpreter do not mix."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.responses = Counter("ar2diff_responses", "Responses by status.", ["status"], registry=registry)
        self.rejected = Counter(
            "ar2diff_rejected", "Requests not answered, by reason.", ["reason"], registry=registry
        )
        self.cancelled = Counter("ar2diff_cancelled", "Choices dropped before their end.", registry=registry)
        self.tokens = Counter("ar2diff_generated_tokens", "Tokens of finished answers.", registry=registry)
        self.forwards = Counter("ar2diff_forward_passes", "Forward passes of finished answers.", registry=registry)
        self.first_token_s = Histogram(
            "ar2diff_time_to_first_token_seconds",
            "From queueing to the first settled token, by request.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.token_s = Histogram(
            "ar2diff_token_seconds", "Decoding time a token.", buckets=_TOKEN_SECONDS, registry=registry
        )
        self.tokens_per_forward = Histogram(
            "ar2diff_tokens_per_forward", "Tokens a forward pass, by answer.", buckets=_SHARES, registry=registry
        )
        self.mean_answer_s = 1.0

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read whenever someone looks."""
        Gauge(name, text, registry=self._registry).set_function(read)

    def observe(self, generation: Generation) -> None:
        """Count a finished answer."""
        count = len(generation.token_ids)
        self.tokens.inc(count)
        self.forwards.inc(generation.num_forward_passes + generation.num_prefill_passes)
        self.tokens_per_forward.observe(generation.tokens_per_forward)
        if count:
            self.token_s.observe(generation.decode_s / count)
        self.mean_answer_s += 0.1 * (generation.prefill_s + generation.decode_s - self.mean_answer_s)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)
