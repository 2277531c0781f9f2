"""What a worker says of itself: to the queue in each beat, to scrapes, to probes."""

import os
import socket
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from producer.contract.calls import QueueView, inspect
from producer.contract.keys import QueueKeys
from producer.contract.running import run
from worker.clock import monotonic_s
from worker.common import Common
from worker.connections import Client
from worker.exchange import Exchange
from worker.life import Life
from worker.metrics import Depth, Rates, Snapshot
from worker.serving import Served

QUEUE_VIEW_AGE_S = 1.0
"""A scrape asks Redis for the queue's depth at most this often."""


class QueueDepth:
    """Looks at a queue, but not at every scrape. Changes with each look."""

    def __init__(
        self, client: Client, partitions: Sequence[QueueKeys], *, clock: Callable[[], float] = monotonic_s
    ) -> None:
        self._client = client
        self._partitions = partitions
        self._clock = clock
        self._depth: Depth | None = None
        self._looked_s = float("-inf")

    def look(self) -> Depth | None:
        """The depth, at most a second old; None while Redis is away."""
        if self._clock() - self._looked_s > QUEUE_VIEW_AGE_S:
            self._looked_s = self._clock()
            try:
                self._depth = _depth_of([run(self._client, inspect(keys)) for keys in self._partitions])
            except (RedisError, OSError):
                self._depth = None
        return self._depth


def _depth_of(views: Sequence[QueueView]) -> Depth:
    ages_ms = [view.server_ms - view.oldest_ms for view in views if view.oldest_ms is not None]
    return Depth(
        jobs=sum(view.waiting_jobs for view in views),
        tokens=sum(view.waiting_tokens for view in views),
        oldest_s=max(ages_ms) / 1000 if ages_ms else None,
        outbox=sum(view.outbox_entries for view in views),
        callbacks=sum(view.callback_entries for view in views),
        dead=sum(view.dead for view in views),
        suspects=sum(view.suspects for view in views),
        worker_deaths=sum(view.worker_deaths for view in views),
        is_paused=any(view.is_paused for view in views),
    )


class About:
    """What this worker says of itself: to the queue in each beat, to scrapes, to probes."""

    def __init__(self, common: Common, served: Served, life: Life, exchange: Exchange, client: Client) -> None:
        self._common = common
        self._served = served
        self._life = life
        self._exchange = exchange
        self._depth = QueueDepth(client, common.partitions)
        self._rates = Rates()
        self._started_ms = common.clock.ms(monotonic_s())

    def say(self) -> dict[str, str]:
        """Facts for `worker status`, and the rate from which starts are estimated."""
        stats = self._served.engine.stats
        self._rates.sample(tokens=stats.num_output_tokens, busy_s=self._life.watch.busy_s)
        return {
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "name": self._common.config.log.name or "-",
            "device": self._common.config.model.device,
            "model": self._common.origin.model,
            "discipline": self._common.config.batching.discipline,
            "fingerprint": self._common.origin.fingerprint,
            "started_ms": str(self._started_ms),
            "held": str(len(self._common.leases)),
            "running": str(stats.num_running),
            "waiting": str(stats.num_waiting),
            "kv_tokens_total": str(stats.kv_tokens_total),
            "kv_tokens_used": str(stats.kv_tokens_used),
            "tokens_per_s": f"{self._rates.tokens_per_s:.1f}",
            "utilisation": f"{self._rates.utilisation:.3f}",
            "state": "quiet" if self._exchange.is_quiet else "pulling",
        }

    def snapshot(self) -> Snapshot:
        """What a scrape shows."""
        stats = self._served.engine.stats
        return Snapshot(
            running_requests=stats.num_running,
            waiting_requests=stats.num_waiting,
            utilisation=self._rates.utilisation,
            tokens_per_second=self._rates.tokens_per_s,
            kv_tokens_total=stats.kv_tokens_total,
            kv_tokens_used=stats.kv_tokens_used,
            preemptions=stats.num_preemptions,
            steps=stats.num_steps,
            prompt_tokens=stats.num_prompt_tokens,
            cached_tokens=stats.num_cached_tokens,
            output_tokens=stats.num_output_tokens,
            redis_outages=self._common.health.num_outages,
            queue=self._depth.look(),
        )

    def sick(self) -> str | None:
        """Why the process should be replaced, if it should."""
        return "a step has outlasted its deadline" if self._life.watch.is_overdue else None

    def unready(self) -> str | None:
        """Why the worker takes no jobs now, if it takes none."""
        if self._exchange.is_quiet:
            return "draining"
        return None if self._common.health.is_well else "redis is unreachable"
