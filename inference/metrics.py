"""What /metrics reports, in Prometheus' text format."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference.engine import Engine

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


class Metrics:
    """Counts requests and waits as they happen; the engine's numbers are read when they are asked for.

    Args:
        engine: None where it is in another process.
    """

    def __init__(self, engine: Engine | None) -> None:
        self._registry = CollectorRegistry()
        if engine is not None:
            self._registry.register(_Engine(engine))
        self.requests = Counter(
            "twinax_requests", "HTTP requests by HTTP status, or `cancelled`", ["route", "outcome"], registry=self._registry
        )
        self.first_token = Histogram(
            "twinax_time_to_first_token_seconds",
            "From a sequence's admission to its first token",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.next_token = Histogram(
            "twinax_inter_token_latency_seconds",
            "Between two tokens of a sequence; tokens that come together share the time",
            buckets=SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Engine(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats, scheduler = self._engine.stats, self._engine.scheduler
        counts = {
            "prompt_tokens": (stats.prompt_tokens, "Prompt tokens of finished sequences"),
            "cached_tokens": (stats.cached_tokens, "Prompt tokens found in the prefix cache"),
            "sampled_tokens": (stats.sampled_tokens, "Sampled tokens"),
            "computed_tokens": (stats.computed_tokens, "Tokens that went through the model"),
            "preemptions": (scheduler.num_preemptions, "Sequences that gave up their pages to others"),
        }
        values = {
            "running": (len(scheduler.running), "Sequences that run"),
            "waiting": (len(scheduler.waiting), "Sequences that wait"),
            "free_pages": (scheduler.pool.num_free, "Pages that nothing holds"),
            "pages": (scheduler.pool.num_pages, "Pages of the pool"),
            "weight_version": (self._engine.version, "Version of the weights that sample"),
        }
        for name, (value, text) in counts.items():
            yield CounterMetricFamily(f"twinax_{name}", text, value=value)
        for name, (value, text) in values.items():
            yield GaugeMetricFamily(f"twinax_{name}", text, value=value)
