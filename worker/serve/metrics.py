"""The metrics of a worker, and the thread that serves /metrics, /healthz and /readyz. Knows no engine and no Redis.

Counting costs a list index; metric families are made when they are scraped.
"""

import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.worker.clock import monotonic_s
from sluice.worker.config import MetricsConfig
from sluice.worker.connection.listening import listen
from sluice.worker.log import Log

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(slots=True, eq=False)
class Histogram:
    """Counts by upper bound, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_SECONDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative count for each upper bound, as Prometheus expects them."""
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip([*map(str, _SECONDS), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


@dataclass(slots=True, eq=False)
class Meters:
    """Counters of one worker. The exchange and pull threads each write their own; any thread reads."""

    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    jobs_by_state: dict[str, int] = field(default_factory=dict[str, int])
    num_jobs_pulled: int = 0
    num_jobs_lost: int = 0
    num_jobs_retried: int = 0
    num_refused_writes: int = 0
    num_round_trips: int = 0
    _both_write: threading.Lock = field(default_factory=threading.Lock)

    def made_round_trip(self) -> None:
        """Count one round trip, from either thread."""
        with self._both_write:
            self.num_round_trips += 1

    def ended(self, state: str, *, ttft_s: float | None, e2e_s: float, gaps_ms: Iterable[float]) -> None:
        """Count one ended job."""
        self.jobs_by_state[state] = self.jobs_by_state.get(state, 0) + 1
        self.e2e.observe(e2e_s)
        if ttft_s is not None:
            self.ttft.observe(ttft_s)
        for gap_ms in gaps_ms:
            self.itl.observe(gap_ms / 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The depth of a queue, all partitions together."""

    jobs: int
    tokens: int
    oldest_s: float | None
    """Age of the oldest waiting job; None when none waits."""

    outbox: int = 0
    callbacks: int = 0
    dead: int = 0
    suspects: int = 0
    worker_deaths: int = 0
    """Since the queue was created."""

    is_paused: bool = False
    """Whether any partition is paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of engine, loop and queue at one moment."""

    running_requests: int
    waiting_requests: int
    utilisation: float
    """Share of the last second in which the loop was stepping."""

    tokens_per_second: float
    kv_tokens_total: int
    kv_tokens_used: int
    preemptions: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    redis_outages: int = 0
    kernels_replaced: int = 0
    queue: Depth | None = None
    """None while Redis is away."""


class WorkerCollector(Collector):
    """A collector of metric families from a snapshot and the meters."""

    def __init__(self, snapshot: Callable[[], Snapshot], meters: Meters) -> None:
        self._snapshot = snapshot
        self._meters = meters

    def collect(self) -> Iterator[Metric]:
        """Yield all families, with the prefix `sluice_`."""
        now = self._snapshot()
        yield from self._gauges(now)
        yield from self._counters(now)
        yield from self._histograms()
        ended = CounterMetricFamily("sluice_jobs_ended", "Jobs that ended at this worker, by state.", labels=["state"])
        for state, count in sorted(self._meters.jobs_by_state.items()):
            ended.add_metric([state], count)
        yield ended

    def _gauges(self, now: Snapshot) -> Iterator[Metric]:
        gauges: list[tuple[str, str, float | None]] = [
            ("running_requests", "Running sequences, which hold blocks.", now.running_requests),
            ("waiting_requests", "Sequences waiting in the engine.", now.waiting_requests),
            ("utilisation", "Share of the last second in which the loop was stepping.", now.utilisation),
            ("tokens_per_second", "Output tokens in the last second.", now.tokens_per_second),
            ("kv_tokens_total", "Token slots of the KV cache.", now.kv_tokens_total),
            ("kv_tokens_used", "Token slots held by running sequences.", now.kv_tokens_used),
            ("kernels_replaced", "Operations that torch's operators compute because a GPU's kernel did not work.",
             now.kernels_replaced),
            *(_of_queue(now.queue) if now.queue else ()),
        ]  # fmt: skip
        for name, about, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(f"sluice_{name}", about, value=value)

    def _counters(self, now: Snapshot) -> Iterator[Metric]:
        counters = [
            ("preemptions", "Preemptions, which release a sequence's blocks.", now.preemptions),
            ("steps", "Steps of the engine.", now.steps),
            ("prompt_tokens", "Prompt tokens, including cached ones.", now.prompt_tokens),
            ("cached_tokens", "Prompt tokens found in the prefix cache.", now.cached_tokens),
            ("output_tokens", "Tokens generated.", now.output_tokens),
            ("jobs_pulled", "Jobs leased from the queue.", self._meters.num_jobs_pulled),
            ("jobs_lost", "Leases taken over by another worker.", self._meters.num_jobs_lost),
            ("jobs_retried", "Jobs that failed here and were queued for a retry.", self._meters.num_jobs_retried),
            ("refused_writes", "Writes refused because another worker holds the lease.",
             self._meters.num_refused_writes),
            ("round_trips", "Pipelined round trips to Redis.", self._meters.num_round_trips),
            ("redis_outages", "Outages of Redis.", now.redis_outages),
            *([("queue_worker_deaths", "Workers that died or failed.", now.queue.worker_deaths)] if now.queue else ()),
        ]  # fmt: skip
        for name, about, value in counters:
            yield CounterMetricFamily(f"sluice_{name}", about, value=value)

    def _histograms(self) -> Iterator[Metric]:
        histograms = [
            ("ttft_seconds", "Time from submit to first token.", self._meters.ttft),
            ("itl_seconds", "Time from one token to the next.", self._meters.itl),
            ("e2e_seconds", "Time from submit to end.", self._meters.e2e),
        ]
        for name, about, histogram in histograms:
            yield HistogramMetricFamily(f"sluice_{name}", about, buckets=histogram.buckets(), sum_value=histogram.sum)


def _of_queue(queue: Depth) -> list[tuple[str, str, float | None]]:
    return [
        ("queue_depth_jobs", "Jobs waiting in the queue.", queue.jobs),
        ("queue_depth_tokens", "Tokens waiting in the queue.", queue.tokens),
        ("queue_oldest_age_seconds", "Age of the oldest waiting job.", queue.oldest_s),
        ("queue_outbox", "Entries waiting for the recorder.", queue.outbox),
        ("queue_callbacks", "Ended jobs and batches waiting for `worker callbacks`.", queue.callbacks),
        ("queue_dead", "Failed jobs in the dead set.", queue.dead),
        ("queue_suspects", "Jobs that run in isolation because their workers died.", queue.suspects),
        ("queue_paused", "1 while the queue is paused.", queue.is_paused),
    ]


class Rates:
    """Tokens per second and share of time stepping, between one sample and the next."""

    def __init__(self, clock: Callable[[], float] = monotonic_s) -> None:
        self._clock = clock
        self._at_s = clock()
        self._tokens = 0
        self._busy_s = 0.0
        self.tokens_per_s = 0.0
        self.utilisation = 0.0

    def sample(self, *, tokens: int, busy_s: float) -> None:
        """Update the rates from the present counters."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._at_s, 1e-6)
        self.tokens_per_s = (tokens - self._tokens) / elapsed_s
        self.utilisation = min(1.0, (busy_s - self._busy_s) / elapsed_s)
        self._at_s, self._tokens, self._busy_s = now_s, tokens, busy_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """The answers of /healthz and /readyz: each returns the reason for a 503, or None."""

    sick: Callable[[], str | None]
    unready: Callable[[], str | None]


class MetricsServer:
    """A server of metrics on its own thread. A component: start, stop."""

    def __init__(self, config: MetricsConfig, collector: Collector, readiness: Readiness, log: Log) -> None:
        self._config = config
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._readiness = readiness
        self._log = log
        self._server: ThreadingHTTPServer | None = None

    @property
    def port(self) -> int | None:
        """The port that it listens on; None if it does not listen."""
        return self._server.server_address[1] if self._server else None

    def start(self) -> None:
        """Listen on the configured port or one of the next; if all are taken, continue without metrics.

        Raises:
            ConfigError: this host has no such address, or this user may not listen on the port.
        """
        if not self._config.enabled:
            return
        listener = listen(self._config)
        if listener is None:
            self._log.warning("metrics not served", port=self._config.port, reason="ports are taken")
            return
        self._server = _Server(listener, _handler(self._registry, self._readiness))
        self._log.info("metrics served", host=self._config.host, port=self.port)
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(ThreadingHTTPServer):
    """A server on a socket that listens already."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        """Serve on a socket that listens already."""
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener


def _handler(registry: CollectorRegistry, readiness: Readiness) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """The handler of three paths; all others are 404."""

        paths: ClassVar[dict[str, Callable[[], tuple[int, str, bytes]]]] = {
            "/metrics": lambda: (200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(registry)),
            "/healthz": lambda: _answer(readiness.sick()),
            "/readyz": lambda: _answer(readiness.unready()),
        }

        def do_GET(self) -> None:  # the name that http.server calls
            """Answer one request."""
            make = self.paths.get(self.path.partition("?")[0])
            status, kind, body = make() if make else (404, "text/plain", b"not found\n")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: scrapes are not events."""

    return Handler


def _answer(problem: str | None) -> tuple[int, str, bytes]:
    return (200, "text/plain", b"ok\n") if problem is None else (503, "text/plain", f"{problem}\n".encode())
