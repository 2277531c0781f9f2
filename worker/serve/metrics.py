"""The metrics of a worker, and the thread that serves them, probes and iterations. Knows no Redis.

Counting costs a list index; metric families are made when they are scraped.
"""

import socket
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import ClassVar
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from sluice.protocol.metrics import PREFIX, WORKER, Metric
from sluice.protocol.states import JobState
from sluice.worker.clock import monotonic_s
from sluice.worker.config import MetricsConfig
from sluice.worker.connection.listening import listen
from sluice.worker.iteration_feed import IterationFeed
from sluice.worker.log import Log

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_END_STATES = [state.value for state in JobState if state.is_terminal]


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
    jobs_by_state: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_END_STATES, 0))
    """By every state that a job can end in. No key is added: another thread may read."""

    jobs_pulled: Counter[str] = field(default_factory=Counter[str])
    """By queue, as `tokens_pulled`. A worker begins with all of its queues, and adds no key."""

    tokens_pulled: Counter[str] = field(default_factory=Counter[str])
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
        self.jobs_by_state[state] += 1
        self.e2e.observe(e2e_s)
        if ttft_s is not None:
            self.ttft.observe(ttft_s)
        for gap_ms in gaps_ms:
            self.itl.observe(gap_ms / 1000)


Value = float | Histogram | Mapping[str, float] | None
"""A number; or one for each state or queue. None is left out."""


class WorkerCollector(Collector):
    """A collector of metric families: the meters, and what `read` returns by metric name at each scrape."""

    def __init__(self, read: Callable[[], Mapping[str, Value]], meters: Meters) -> None:
        self._read = read
        self._meters = meters

    def collect(self) -> Iterator[Family]:
        """Yield all families. One without a value is left out."""
        values = {**self._read(), **_of_meters(self._meters)}
        for metric in WORKER:
            value = values.get(metric.name)
            if value is not None and value != {}:
                yield _family(metric, value)


def _family(metric: Metric, value: float | Histogram | Mapping[str, float]) -> Family:
    name = f"{PREFIX}{metric.name}"
    if isinstance(value, Histogram):
        return HistogramMetricFamily(name, metric.about, buckets=value.buckets(), sum_value=value.sum)
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    if isinstance(value, Mapping):
        family = kind(name, metric.about, labels=metric.labels)
        for label, number in sorted(value.items()):
            family.add_metric([label], number)
        return family
    return kind(name, metric.about, value=value)


def _of_meters(meters: Meters) -> dict[str, Value]:
    return {
        "jobs_pulled": meters.jobs_pulled,
        "tokens_pulled": meters.tokens_pulled,
        "jobs_lost": meters.num_jobs_lost,
        "jobs_retried": meters.num_jobs_retried,
        "refused_writes": meters.num_refused_writes,
        "round_trips": meters.num_round_trips,
        "jobs_ended": meters.jobs_by_state,
        "ttft_seconds": meters.ttft,
        "itl_seconds": meters.itl,
        "e2e_seconds": meters.e2e,
    }


class SampledRates:
    """Rates between one sample and the next. Mutable."""

    def __init__(self, clock: Callable[[], float] = monotonic_s) -> None:
        self._clock = clock
        self._at_s = clock()
        self._before = (0, 0, 0, 0.0)
        self.tokens_per_s = 0.0
        self.rows_per_step = 0.0
        """0 if there was no step."""

        self.loop_busy = 0.0

    def sample(self, *, tokens: int, steps: int, rows: int, busy_s: float) -> None:
        """Update the rates from the counts since the start: output tokens, steps, their sequences added up, time."""
        now_s, before = self._clock(), self._before
        elapsed_s = max(now_s - self._at_s, 1e-6)
        self.tokens_per_s = (tokens - before[0]) / elapsed_s
        self.rows_per_step = (rows - before[2]) / max(1, steps - before[1])
        self.loop_busy = min(1.0, (busy_s - before[3]) / elapsed_s)
        self._at_s, self._before = now_s, (tokens, steps, rows, busy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """The answers of /healthz and /readyz: each returns the reason for a 503, or None."""

    sick: Callable[[], str | None]
    unready: Callable[[], str | None]


class MetricsServer:
    """A server of metrics on its own thread. A component: start, stop."""

    def __init__(
        self, config: MetricsConfig, collector: Collector, readiness: Readiness, feed: IterationFeed, log: Log
    ) -> None:
        self._config = config
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._readiness = readiness
        self._feed = feed
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
        self._server = _Server(listener, _handler(self._registry, self._readiness, self._feed))
        port = self._config.port
        if port not in (self.port, 0, MetricsConfig().port):
            # A configured port is scraped, and there another process would answer.
            self._log.warning("metrics served on another port", asked_port=port, port=self.port, reason="port is taken")
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


def _handler(registry: CollectorRegistry, readiness: Readiness, feed: IterationFeed) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """The handler of four paths; all others are 404."""

        paths: ClassVar[dict[str, Callable[[], tuple[int, str, bytes]]]] = {
            "/metrics": lambda: (200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(registry)),
            "/healthz": lambda: _answer(readiness.sick()),
            "/readyz": lambda: _answer(readiness.unready()),
        }

        def do_GET(self) -> None:  # the name that http.server calls
            """Answer one request."""
            path, _, query = self.path.partition("?")
            if path == "/iterations" and _is_local(self.client_address[0], self.headers):
                # To this host alone: names of jobs have their tenants.
                self._begin(200, "text/plain; charset=utf-8")
                _follow(feed, self.wfile.write, has_all=query == "all")
                return
            make = self.paths.get(path)
            status, kind, body = make() if make else (404, "text/plain", b"not found\n")
            self._begin(status, kind, str(len(body)))
            self.wfile.write(body)

        def _begin(self, status: int, kind: str, length: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if length is not None:
                self.send_header("Content-Length", length)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: scrapes are not events."""

    return Handler


_FORWARDING = ("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP")


def _is_local(client: str, headers: Message) -> bool:
    """Return whether a request is one of this host.

    One that a proxy here passes on is not, nor one by another name: a page's own name may lead here (DNS rebinding).
    """
    if not ip_address(client).is_loopback or any(name in headers for name in _FORWARDING):
        return False
    hosts = headers.get_all("Host", [])
    return len(hosts) == 1 and _is_loopback(hosts[0])


def _is_loopback(host: str) -> bool:
    """Return whether a Host header, perhaps with a port, is a name or an address of this host's loopback."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _follow(feed: IterationFeed, write: Callable[[bytes], object], *, has_all: bool) -> None:
    """Write iterations until the client has gone, which an empty line a second finds out."""
    with suppress(OSError), feed.follow() as next_iteration:
        while True:
            iteration = next_iteration()
            if iteration is None or has_all or iteration.has_changes:
                write(f"{iteration or ''}\n".encode())


def _answer(problem: str | None) -> tuple[int, str, bytes]:
    return (200, "text/plain", b"ok\n") if problem is None else (503, "text/plain", f"{problem}\n".encode())
