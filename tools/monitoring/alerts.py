"""The alerts: when each fires, what it means, and what to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tools.monitoring.queries import growth, increase, now

Json = dict[str, Any]  # Any: as YAML has it


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert."""

    name: str
    expression: str
    lasts: str
    """How long the expression must hold."""

    severity: Literal["page", "ticket"]
    when: str
    """The same in words, for the reference."""

    meaning: str
    action: str


ALERTS = (
    Alert(
        "SluiceNoWorker",
        f"{now('scale_backlog_jobs')} > 0 and {now('scale_workers')} == 0",
        "5m", "page", "`scale_backlog_jobs` above 0 and `scale_workers` 0 for 5 minutes",
        "Jobs wait, and no worker is alive.",
        "Start a worker. `worker doctor` says what prevents its start.",
    ),
    Alert(
        "SluiceJobsTooLate",
        f"{now('scale_nearest_deadline_seconds')} < 0",
        "2m", "page", "`scale_nearest_deadline_seconds` below 0 for 2 minutes",
        "A job is past its deadline, and nothing ends it: no worker is alive, or Redis is slow.",
        "Look at the workers and at Redis; `wanted_workers` says how many are needed.",
    ),
    Alert(
        "SluiceQueuePaused",
        f"{now('queue_paused')} > 0",
        "15m", "ticket", "`queue_paused` 1 for a quarter of an hour",
        "The queue is paused.",
        "`producer queues resume`",
    ),
    Alert(
        "SluiceOutboxGrows",
        f"{growth('queue_outbox', window='10m')} > 0 and {now('queue_outbox')} > 1000",
        "10m", "page", "`queue_outbox` over 1,000 and growing for 10 minutes",
        "No recorder runs, or the database is down. At `max_outbox_entries` or `max_outbox_bytes` submits are refused.",
        "Read the recorder's log; run `worker doctor`.",
    ),
    Alert(
        "SluiceResultsMissed",
        f"{increase('queue_results_missed', window='1h')} > 0",
        "0m", "ticket", "`queue_results_missed_total` rises",
        "The recorder was later than `--result-ttl`, so results over 1 MiB are missing: `record_error` names them.",
        "Run the recorder without pauses, or raise `--result-ttl`.",
    ),
    Alert(
        "SluiceCallbacksGrow",
        f"{growth('queue_callbacks', window='10m')} > 0 and {now('queue_callbacks')} > 100",
        "10m", "ticket", "`queue_callbacks` over 100 and growing for 10 minutes",
        "`worker callbacks` does not run. Its entries count against the bound of the outbox.",
        "Start it.",
    ),
    Alert(
        "SluiceJobsDie",
        f"{growth('queue_dead', window='10m')} > 0",
        "0m", "ticket", "`queue_dead` rises",
        "Jobs fail and are not retried any more. Jobs with a prompt that the model cannot read do not count.",
        "`producer requeue --all` lists them with their errors. Remove the cause, then repeat it with `--yes`.",
    ),
    Alert(
        "SluiceSuspects",
        f"{now('queue_suspects')} > 0",
        "10m", "ticket", "`queue_suspects` above 0 for 10 minutes",
        "Jobs whose workers died run in isolation, one at a time.",
        "Read the log of the worker that died.",
    ),
    Alert(
        "SluiceWorkersDie",
        f"{increase('queue_worker_deaths', window='10m')} > 0",
        "0m", "page", "`queue_worker_deaths_total` rises",
        "Workers end without deregistration, fail, or hang for longer than a lease. Each partition counts a death.",
        "Read the supervisor's log: killed by the kernel, evicted, or ended by a job (`queue_suspects`).",
    ),
    Alert(
        "SluiceWritesRefused",
        f"{increase('refused_writes', 'instance', window='10m')} > 0",
        "0m", "ticket", "`refused_writes_total` rises",
        "A worker was slow enough to be replaced while it still ran.",
        "Look for the cause: swapped memory, a busy processor, a step that takes seconds.",
    ),
    Alert(
        "SluiceStepsFail",
        f"{increase('failed_steps', 'instance', window='10m')} > 0",
        "0m", "ticket", "`failed_steps_total` rises",
        "Steps fail: because of a job, for lack of memory, or because of the device.",
        "Read the worker's log: `step failed` has the error.",
    ),
    Alert(
        "SluiceKernelsReplaced",
        f"{now('kernels_replaced', 'instance')} > 0",
        "1m", "ticket", "`kernels_replaced` above 0",
        "Kernels do not work on this GPU, and torch's operators replace them: the worker is slower.",
        "Read the warnings of its start; report them with the versions. With `--kernels torch` this is intended.",
    ),
    Alert(
        "SluiceRedisOutage",
        f"{increase('redis_outages', 'instance', window='10m')} > 0",
        "0m", "ticket", "`redis_outages_total` rises",
        "Redis or the network was unreachable. Each outage is in the log, with its length.",
        "Look at the server.",
    ),
    Alert(
        "SluiceRedisAway",
        f"{now('places', 'instance')} unless on (instance) {now('queue_outbox', 'instance')}",
        "1m", "page", "`queue_…` is absent, `/readyz` is 503",
        "Redis is unreachable now.",
        "Look at the server.",
    ),
    Alert(
        "SluiceGatewayErrors",
        'sum by (job) (rate(sluice_gateway_requests_total{status=~"5.."}[5m]))'
        " > 0.05 * sum by (job) (rate(sluice_gateway_requests_total[5m]))",
        "5m", "page", "over 5 % of `gateway_requests_total` have a status from 500 on, for 5 minutes",
        "The gateway refuses or fails: Redis or the database is unreachable, or a bound of the process is reached.",
        "Read its log by `status`; `gateway_refused_total` names the bound.",
    ),
)  # fmt: skip


def rules() -> Json:
    """Return the rules as Prometheus reads them."""
    return {"groups": [{"name": "sluice", "rules": list(_rules())}]}


def _rules() -> Iterator[Json]:
    for alert in ALERTS:
        yield {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.meaning, "runbook": alert.action},
        }
