"""The status of a worker: for the queue with each heartbeat, for scrapes and for probes."""

import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from redis.exceptions import RedisError

from sluice.engine.interface import EngineStats
from sluice.protocol.calls import PartitionView, inspect
from sluice.protocol.keys import QueueKeys, by_queue
from sluice.protocol.limits import CAPACITY_FIELD, HELD_TOKENS_FIELD
from sluice.protocol.offers import FIELD
from sluice.protocol.redis.execution import run
from sluice.protocol.workers import ADAPTERS, NUM_SAMPLES, QUEUES, SAMPLE_S
from sluice.version import installed_version
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.clients import Client
from sluice.worker.device_driver import utilisation_of
from sluice.worker.model.loaded_model import LoadedModel
from sluice.worker.serve.context import WorkerContext
from sluice.worker.serve.metrics import SampledRates, Value

QUEUE_VIEW_AGE_S = 1.0
"""Least time between two reads of the queue's depth."""


class QueueDepth:
    """The depth of each queue, cached between scrapes. Changes with each read."""

    def __init__(
        self, client: Client, partitions: Sequence[QueueKeys], *, clock: Callable[[], float] = monotonic_s
    ) -> None:
        self._client = client
        self._partitions = by_queue(partitions)
        self._clock = clock
        self._depth: dict[str, Value] = {}
        self._looked_s = float("-inf")

    def look(self) -> dict[str, Value]:
        """Return the depths by metric and queue, at most `QUEUE_VIEW_AGE_S` old; nothing while Redis is away."""
        if self._clock() - self._looked_s > QUEUE_VIEW_AGE_S:
            self._looked_s = self._clock()
            try:
                views = {
                    queue: [run(self._client, inspect(keys)) for keys in partitions]
                    for queue, partitions in self._partitions.items()
                }
                self._depth = _by_metric({queue: _depth_of(own) for queue, own in views.items()})
            except (RedisError, OSError):
                self._depth = {}
        return self._depth


def _by_metric(depths: Mapping[str, Mapping[str, float | None]]) -> dict[str, Value]:
    """Turn the depths by queue and metric into those by metric and queue, without those that are None."""
    by_metric: dict[str, Value] = {}
    for name in next(iter(depths.values())):
        by_metric[name] = {queue: value for queue, own in depths.items() if (value := own[name]) is not None}
    return by_metric


def _depth_of(views: Sequence[PartitionView]) -> dict[str, float | None]:
    ages_ms = [view.server_ms - view.oldest_ms for view in views if view.oldest_ms is not None]
    return {
        "queue_depth_jobs": sum(view.waiting_jobs for view in views),
        "queue_depth_tokens": sum(view.waiting_tokens for view in views),
        "queue_oldest_age_seconds": max(ages_ms) / 1000 if ages_ms else None,
        "queue_outbox": sum(view.outbox_entries for view in views),
        "queue_callbacks": sum(view.callback_entries for view in views),
        "queue_dead": sum(view.dead for view in views),
        "queue_suspects": sum(view.suspects for view in views),
        "queue_paused": any(view.is_paused for view in views),
        "queue_worker_deaths": sum(view.worker_deaths for view in views),
        "queue_results_missed": sum(view.results_missed for view in views),
    }


class Recent:
    """The last minutes of a worker, in samples of ten seconds. Changes with each heartbeat."""

    def __init__(self, *, clock: Callable[[], float] = monotonic_s) -> None:
        self._clock = clock
        self._began_s = clock()
        self._tokens = (0, 0)
        self._samples: deque[str] = deque(maxlen=NUM_SAMPLES)

    def sample(self, *, running: int, waiting: int, kv_share: float, tokens: tuple[int, int]) -> None:
        """Add a sample if the last one is over; `tokens` are the counts of prompt and output tokens so far."""
        elapsed_s = self._clock() - self._began_s
        if elapsed_s < SAMPLE_S:
            return
        rates = [round((now - before) / elapsed_s) for now, before in zip(tokens, self._tokens, strict=True)]
        self._samples.append(",".join(map(str, (running, waiting, round(1000 * kv_share), *rates))))
        self._began_s, self._tokens = self._clock(), tokens

    def __str__(self) -> str:
        """Join the samples, oldest first.

        One has the requests in the batch, those that wait, thousandths of the KV cache, and tokens per second of
        prompts and of outputs.
        """
        return ";".join(self._samples)


class StatusReporter:
    """The reporter of one worker's status. Called by the heartbeat and by the metrics server."""

    def __init__(self, context: WorkerContext, served: LoadedModel, client: Client) -> None:
        """Report on a worker. `client` is a connection for scrapes alone."""
        self._context = context
        self._served = served
        self._depth = QueueDepth(client, context.partitions)
        self._rates, self._recent = SampledRates(), Recent()
        self._read_device = utilisation_of(context.config.model.device)
        self._device_utilisation: float | None = None
        self._last_failure: str | None = None
        self._offer = str(served.offer)
        self._started_ms = context.clock.ms(monotonic_s())

    def report(self) -> dict[str, str]:
        """Return the facts for `worker status`, with the rate by which start times are estimated."""
        stats = self._served.engine.stats
        self._sample(stats)
        held, capacity = self._context.leases.all(), self._context.capacity
        capacity.sample(monotonic_s(), held)
        return {
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "name": self._context.config.log.name or "-",
            "version": installed_version(),
            "device": self._context.config.model.device,
            "model": self._context.origin.model,
            QUEUES: " ".join(self._context.config.queue.name),
            **({ADAPTERS: " ".join(self._context.origin.adapters)} if self._context.origin.adapters else {}),
            FIELD: self._offer,
            "discipline": self._context.config.batching.discipline,
            "kernels": " ".join(self._served.facts.stepped_down) or "-",
            "fingerprint": self._context.origin.fingerprint,
            "started_ms": str(self._started_ms),
            "held": str(len(held)),
            HELD_TOKENS_FIELD: str(sum(job.leased.cost - job.used_tokens for job in held)),
            "places": str(stats.num_places),
            "running": str(stats.num_running),
            "waiting": str(stats.num_waiting),
            "kv_tokens_total": str(stats.kv_tokens_total),
            "largest_job_tokens": str(self._served.engine.most_offered_tokens),
            "kv_tokens_used": str(stats.kv_tokens_used),
            "tokens_per_s": f"{self._rates.tokens_per_s:.1f}",
            "step_occupancy": f"{self._rates.rows_per_step / stats.num_places:.3f}",
            "loop_busy": f"{self._rates.loop_busy:.3f}",
            **({} if self._device_utilisation is None else {"device_utilisation": f"{self._device_utilisation:.2f}"}),
            "recent": str(self._recent),
            "state": "quiet" if self._context.quiet.is_asked else "pulling",
            **({} if capacity.tokens_per_s is None else {CAPACITY_FIELD: f"{capacity.tokens_per_s:.1f}"}),
        }

    def _sample(self, stats: EngineStats) -> None:
        """Measure what happened since the last report, and log the failure of a step if it is another one."""
        if stats.last_failure != self._last_failure:
            self._last_failure = stats.last_failure
            self._context.log.warning("step failed", error=stats.last_failure, failed_steps=stats.num_failed_attempts)
        self._rates.sample(
            tokens=stats.num_output_tokens,
            steps=stats.num_steps,
            rows=stats.num_rows,
            busy_s=self._context.watchdog.busy_s,
        )
        self._device_utilisation = self._read_device()
        self._recent.sample(
            running=stats.num_running,
            waiting=stats.num_waiting,
            kv_share=stats.kv_tokens_used / max(1, stats.kv_tokens_total),
            tokens=(stats.num_prompt_tokens, stats.num_output_tokens),
        )

    def metrics(self) -> dict[str, Value]:
        """Return the values for a scrape, by metric name."""
        stats = self._served.engine.stats
        return {
            "places": stats.num_places,
            "places_used": stats.num_running,
            "engine_waiting": stats.num_waiting,
            "step_occupancy": self._rates.rows_per_step / stats.num_places,
            "loop_busy": self._rates.loop_busy,
            "device_utilisation": self._device_utilisation,
            "tokens_per_second": self._rates.tokens_per_s,
            "kv_tokens_total": stats.kv_tokens_total,
            "kv_tokens_used": stats.kv_tokens_used,
            "preemptions": stats.num_preemptions,
            "steps": stats.num_steps,
            "failed_steps": stats.num_failed_attempts,
            "prompt_tokens": stats.num_prompt_tokens,
            "cached_tokens": stats.num_cached_tokens,
            "loaded_tokens": stats.num_loaded_tokens,
            "output_tokens": stats.num_output_tokens,
            "drafted_tokens": stats.num_drafted_tokens,
            "accepted_tokens": stats.num_accepted_tokens,
            "redis_outages": self._context.health.num_outages,
            "kernels_replaced": len(self._served.facts.stepped_down),
            **self._depth.look(),
        }

    def sick(self) -> str | None:
        """Return why the process should be restarted; None if it should not."""
        return "a step has outlasted its deadline" if self._context.watchdog.is_overdue else None

    def unready(self) -> str | None:
        """Return why the worker takes no jobs now; None if it takes jobs."""
        if self._context.quiet.is_asked:
            return "quiet"
        return None if self._context.health.is_well else "redis is unreachable"
