"""The live workers of queues, from their heartbeats. Reads only."""

from collections.abc import Mapping, Sequence

from sluice.protocol.offers import Offer
from sluice.protocol.redis.surveys import pages_of_workers
from sluice.protocol.workers import ADAPTERS, QUEUES
from sluice.worker.checks.queue_check import TWO_MODELS_ADVICE, jobs_left_behind, models_of, two_models
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import connect
from sluice.worker.connection.server_checks import expecting_answers
from sluice.worker.endpoints import stated_partitions_of

COLUMNS = (
    *("worker", "name", "host", "pid", "device", "model", "discipline", "state"),
    *("held", "places", "running", "waiting", "loop_busy", "tokens_per_s"),
)


def living_workers(config: WorkerConfig, url: str) -> list[dict[str, str]]:
    """Return the status fields of each live worker of the queues on a server, with its incarnation.

    Raises:
        ConfigError: the settings name another number of partitions than the workers serve.
        NotReady: Redis does not answer.
    """
    client = connect(url, timeout_s=config.redis.timeout_s)
    workers: dict[str, dict[str, str]] = {}
    with expecting_answers(url):
        for keys in stated_partitions_of(client, config):
            for page in pages_of_workers(client, keys):
                workers |= {incarnation: {"worker": incarnation, **about} for incarnation, about in page.items()}
    return list(workers.values())


def jobs_of_earlier_format(config: WorkerConfig, url: str) -> list[str]:
    """Return a sentence for each queue that has jobs in the format of an earlier version.

    Raises:
        ConfigError, NotReady: as `living_workers`.
    """
    client = connect(url, timeout_s=config.redis.timeout_s)
    with expecting_answers(url):
        return jobs_left_behind(client, stated_partitions_of(client, config))


def table_of(workers: Sequence[Mapping[str, str]], where: str) -> str:
    """Format workers as a table, what their engines can run, and warnings; `where` has the queue and the server."""
    if not workers:
        return f"no living workers on {where}"
    rows = [COLUMNS, *([_cell(worker, name) for name in COLUMNS] for worker in workers)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(models := models_of(workers)) > 1:
        lines.append(f"warning: {two_models(models)}. {TWO_MODELS_ADVICE}")
    offers = {str(offer): offer for offer in map(Offer.of, workers) if offer is not None}
    lines += [f"engine {offer.sentence}" for offer in offers.values()]
    lines += dict.fromkeys(
        f"model {worker.get('model', '-')} has the adapters {', '.join(adapters)}"
        for worker in workers
        if (adapters := worker.get(ADAPTERS, "").split())
    )
    lines += [
        f"worker {_cell(worker, 'worker')} serves the queues {', '.join(queues)}"
        for worker in workers
        if len(queues := worker.get(QUEUES, "").split()) > 1
    ]
    for worker in workers:
        if (replaced := worker.get("kernels", "-")) != "-":
            lines.append(
                f"warning: worker {_cell(worker, 'worker')}: torch's operators replace the kernels of {replaced}"
            )
    return "\n".join(lines)


def _cell(worker: Mapping[str, str], name: str) -> str:
    value = worker.get(name, "-")
    return value[:8] if name == "worker" else value.replace("_", " ") if name == "state" else value
