"""The table of all metrics that workers and gateways serve to Prometheus, for the reference and the dashboard, too.

A recorder and `worker callbacks` serve no metrics: their backlogs are in the queue, and workers report them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PREFIX = "sluice_"

Kind = Literal["gauge", "counter", "histogram"]
Source = Literal["worker", "gateway"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a process."""

    name: str
    """Name without `PREFIX`, and without the `_total` of a counter."""

    kind: Kind
    about: str
    labels: tuple[str, ...] = ()
    is_conditional: bool = False
    """Whether the metric is left out if it has no value."""

    @property
    def sample(self) -> str:
        """Name in a query; for a histogram, without the suffix of a part."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def is_of_queue(self) -> bool:
        """Whether every process reports the same value, that of the whole queue; aggregate it with `max`."""
        return self.name.startswith(("queue_", "scale_", "tenant_"))


_OF_QUEUE = ("queue",)

WORKER = (
    Metric("places", "gauge", "Sequences that can run at once."),
    Metric("places_used", "gauge", "Running sequences, which hold blocks."),
    Metric("engine_waiting", "gauge", "Sequences waiting in the engine. Jobs on the queue are not among them."),
    Metric(
        "step_occupancy", "gauge", "Sequences in a step, as a share of the places; mean of the last second's steps."
    ),
    Metric("loop_busy", "gauge", "Share of the last second in which a step ran, however few sequences it had."),
    Metric(
        "device_utilisation",
        "gauge",
        "Share of time in which the GPU ran a kernel, as its driver reports.",
        is_conditional=True,
    ),
    Metric("tokens_per_second", "gauge", "Output tokens in the last second."),
    Metric("kv_tokens_total", "gauge", "Token slots of the KV cache."),
    Metric("kv_tokens_used", "gauge", "Token slots held by running sequences."),
    Metric("kernels_replaced", "gauge", "Operations that torch computes because a GPU's kernel did not work."),
    Metric("queue_depth_jobs", "gauge", "Jobs waiting in the queue.", _OF_QUEUE),
    Metric("queue_depth_tokens", "gauge", "Tokens waiting in the queue.", _OF_QUEUE),
    Metric(
        "queue_oldest_age_seconds",
        "gauge",
        "Age of the oldest waiting job; absent if none waits.",
        _OF_QUEUE,
        is_conditional=True,
    ),
    Metric("queue_outbox", "gauge", "Entries waiting for the recorder.", _OF_QUEUE),
    Metric("queue_callbacks", "gauge", "Ended jobs and batches waiting for `worker callbacks`.", _OF_QUEUE),
    Metric("queue_dead", "gauge", "Failed jobs in the dead set.", _OF_QUEUE),
    Metric("queue_suspects", "gauge", "Jobs that run in isolation because their workers died.", _OF_QUEUE),
    Metric("queue_paused", "gauge", "1 while the queue is paused.", _OF_QUEUE),
    Metric("preemptions", "counter", "Preemptions, which release a sequence's blocks."),
    Metric("steps", "counter", "Steps of the engine."),
    Metric("failed_steps", "counter", "Attempts at a step, or at a part of one, that failed."),
    Metric("prompt_tokens", "counter", "Prompt tokens, including cached ones."),
    Metric("cached_tokens", "counter", "Prompt tokens found in the prefix cache."),
    Metric("loaded_tokens", "counter", "Tokens restored from the host tier of the prefix cache."),
    Metric("output_tokens", "counter", "Tokens generated."),
    Metric("drafted_tokens", "counter", "Tokens guessed and verified (speculation)."),
    Metric("accepted_tokens", "counter", "Guessed tokens that were accepted."),
    Metric("jobs_pulled", "counter", "Jobs leased from the queue.", _OF_QUEUE),
    Metric("tokens_pulled", "counter", "Tokens that they reserve, which several queues share by weight.", _OF_QUEUE),
    Metric("jobs_lost", "counter", "Leases taken over by another worker."),
    Metric("jobs_retried", "counter", "Jobs that failed here and were queued for a retry."),
    Metric("refused_writes", "counter", "Writes refused because another worker holds the lease."),
    Metric("round_trips", "counter", "Pipelined round trips to Redis."),
    Metric("redis_outages", "counter", "Outages of Redis."),
    Metric("queue_worker_deaths", "counter", "Workers that died or failed.", _OF_QUEUE),
    Metric("queue_results_missed", "counter", "Results over 1 MiB deleted before the recorder read them.", _OF_QUEUE),
    Metric("jobs_ended", "counter", "Jobs that ended at this worker, by state.", ("state",)),
    Metric("ttft_seconds", "histogram", "Time from submit to first token."),
    Metric("itl_seconds", "histogram", "Time from one token to the next."),
    Metric("e2e_seconds", "histogram", "Time from submit to end."),
)
"""The metrics of a worker."""

GATEWAY = (
    Metric("scale_backlog_jobs", "gauge", "Jobs that could start now.", _OF_QUEUE),
    Metric("scale_backlog_tokens", "gauge", "Tokens that they reserve.", _OF_QUEUE),
    Metric("scale_running_jobs", "gauge", "Jobs that workers hold.", _OF_QUEUE),
    Metric("scale_running_tokens", "gauge", "Reserved tokens that they have not used up.", _OF_QUEUE),
    Metric("scale_workers", "gauge", "Living workers.", _OF_QUEUE),
    Metric(
        "scale_worker_tokens_per_second",
        "gauge",
        "Reserved tokens a second of one worker that is full; that of the last one when none is left.",
        _OF_QUEUE,
        is_conditional=True,
    ),
    Metric("scale_oldest_age_seconds", "gauge", "Age of the oldest waiting job.", _OF_QUEUE, is_conditional=True),
    Metric(
        "scale_nearest_deadline_seconds",
        "gauge",
        "Time until the nearest deadline; below 0 if it has passed.",
        _OF_QUEUE,
        is_conditional=True,
    ),
    Metric("scale_paused", "gauge", "1 while the queue is paused.", _OF_QUEUE),
    Metric(
        "scale_wanted_workers",
        "gauge",
        "Workers that clear the backlog in `?within_s=` (300), from `?min=` (0) to `?max=` (100).",
        _OF_QUEUE,
        is_conditional=True,
    ),
    Metric(
        "tenant_waiting_jobs",
        "gauge",
        "Jobs of a tenant that wait: a series for every tenant that waits or has a weight; with the scope `admin` too.",
        ("queue", "tenant"),
        is_conditional=True,
    ),
    Metric(
        "tenant_waiting_tokens",
        "gauge",
        "Tokens that they reserve; likewise.",
        ("queue", "tenant"),
        is_conditional=True,
    ),
    Metric("gateway_requests", "counter", "Requests that this process answered.", ("status",)),
    Metric("gateway_refused", "counter", "Requests refused because of a bound.", ("bound",)),
)
"""The metrics of a gateway."""

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*WORKER, *GATEWAY)}


def text_of(metric: Metric, samples: "list[tuple[tuple[str, ...], float]]") -> Iterator[str]:
    """Yield the lines of a gauge or counter in Prometheus's text format; `samples`: pairs of label values and value."""
    yield f"# HELP {metric.sample} {metric.about}\n# TYPE {metric.sample} {metric.kind}\n"
    for values, number in samples:
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(metric.labels, values, strict=True))
        yield f"{metric.sample}{{{labels}}} {float(number):.15g}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
