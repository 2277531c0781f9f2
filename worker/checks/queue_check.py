"""Check the queues: that their keys are Sluice's, and that this worker agrees with their live workers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from redis.exceptions import ResponseError

from sluice.protocol.calls import (
    KnownSettings,
    PartitionView,
    QueueSettings,
    configure,
    inspect,
    maintain,
    restore_settings,
)
from sluice.protocol.chains.chain import ChainKeys
from sluice.protocol.errors import WireError
from sluice.protocol.formats import look_for_format_1, said_of_format_1
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import QueueKeys, by_queue
from sluice.protocol.redis.error_kinds import ErrorKind, classify
from sluice.protocol.redis.execution import run, run_commands
from sluice.worker.checks.redis_check import durability_results
from sluice.worker.checks.site import CheckResult, Site, warning
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.availability import is_away
from sluice.worker.connection.clients import Client
from sluice.worker.endpoints import partitions_of
from sluice.worker.errors import ConfigError
from sluice.worker.model.folders import must_download
from sluice.worker.model.loaded_model import LoadedModel


def check_queues(site: Site) -> Iterator[CheckResult]:
    """Check every partition of every queue.

    Raises:
        ConfigError: another program uses its keys, or its workers have promised otherwise.
    """
    for queue, partitions in by_queue(partitions_of(site.config)).items():
        yield from _check_queue(site, queue, partitions)


def _check_queue(site: Site, queue: str, partitions: Sequence[QueueKeys]) -> Iterator[CheckResult]:
    prepared = None if must_download(site.config.model.path) else site.model
    models = {(prepared.name if prepared else site.config.model.path) or ""}
    for keys in partitions:
        view = site.ask_redis(lambda client, keys=keys: look_at(client, keys))
        check_compatibility(queue, view, site.config, prepared.max_job_tokens if prepared else None)
        models.update(set(view.models) - view.parents.keys())
        yield from site.ask_redis(lambda client, keys=keys: list(_clock_results(client, keys)))
    site.ask_redis(lambda client: check_left_out(client, queue, len(partitions)))
    for sentence in site.ask_redis(lambda client: jobs_left_behind(client, partitions)):
        yield warning("queue format", sentence)
    if len(models) > 1:
        yield warning("queue models", two_models(models), TWO_MODELS_ADVICE)
    yield CheckResult("queue", f"{queue!r} agrees with these settings")
    yield from site.ask_redis(lambda client: list(durability_results(client, partitions[0])))


TWO_MODELS_ADVICE = "A job that names no model runs on any of them. Give each model a queue, or name it in every job."


def models_of(workers: Iterable[Mapping[str, str]]) -> set[str]:
    """Return the models that workers report in their heartbeats."""
    return {about["model"] for about in workers if "model" in about}


def two_models(models: Iterable[str]) -> str:
    """Say that the workers of a queue serve several models."""
    return f"its workers serve several models: {', '.join(sorted(models))}"


def look_at(client: Client, keys: QueueKeys) -> PartitionView:
    """Return the state of a partition.

    Raises:
        ConfigError: another program uses its keys, or the server refuses the scripts.
        RedisError: the server is unreachable, cannot serve now, or refuses this user.
    """
    try:
        # It checks the type of every key of the queue, and changes no more than any worker's maintenance does.
        run(client, maintain(keys))
        return run(client, inspect(keys))
    except ResponseError as error:
        # A full disk, a failover or a server that loads passes: only what a person must change ends the start.
        if is_away(error) or classify(error) is ErrorKind.DENIED_IN_SCRIPT:
            raise
        is_foreign = "WRONGTYPE" in str(error)
        advice = " Remove or rename what another program left there." if is_foreign else ""
        problem = f"SLUICE_QUEUE: {keys.prefix} cannot be used: {str(error).rstrip('.')}."
        raise ConfigError([f"{problem}{advice}"]) from error


def check_compatibility(name: str, view: PartitionView, config: WorkerConfig, max_job_tokens: int | None) -> None:
    """Check that a worker agrees with the live workers of a partition.

    Args:
        name: The queue.
        view: The partition.
        config: The settings.
        max_job_tokens: The largest job that this worker can run; None if that is not known yet.

    Raises:
        ConfigError: it would not.
    """
    stated = int(view.settings.get("max_job_tokens") or 0)
    if view.num_workers and max_job_tokens is not None and stated > max_job_tokens:
        raise ConfigError(
            [
                f"SLUICE_QUEUE: the workers of {name!r} take jobs of {stated} tokens, this one only "
                f"{max_job_tokens}: give it more memory or a longer context, or another queue"
            ]
        )
    partitions = int(view.settings.get("partitions") or 0)
    if view.num_workers and partitions not in (0, config.queue.num_partitions):
        raise ConfigError(
            [
                f"SLUICE_PARTITIONS: the workers of {name!r} serve {partitions} partitions, this one would serve "
                f"{config.queue.num_partitions}: give it the same, or stop the others first"
            ]
        )


def check_left_out(client: Client, queue: str, num_partitions: int) -> None:
    """Check that the partitions after the last have no jobs: the queue may have had more partitions before.

    Of waiting jobs, the partition after the last is looked at; of blocked jobs, which partition 0 keeps, all.

    Raises:
        ConfigError: it has.
    """
    left_out = QueueKeys(queue, num_partitions)
    view = look_at(client, left_out)
    if view.waiting_jobs or view.running_jobs:
        raise ConfigError(
            [
                f"SLUICE_PARTITIONS: partition {left_out.partition} of {queue!r} has jobs that no worker "
                f"would serve: give its former number of partitions until it is empty"
            ]
        )
    blocked = client.hscan_iter(ChainKeys(QueueKeys(queue)).blocked, count=1000)
    names = (name.decode(errors="replace") for name, _ in blocked)
    lost = next((name for name in names if _partition_of(name) >= num_partitions), None)
    if lost is not None:
        raise ConfigError(
            [
                f"SLUICE_PARTITIONS: the blocked job {lost} of {queue!r} would be released to a partition that no "
                f"worker would serve: give its former number of partitions until it has been released"
            ]
        )


def _partition_of(name: str) -> int:
    try:
        return split_job_id(name)[0]
    except WireError:
        return 0


def jobs_left_behind(client: Client, partitions: Sequence[QueueKeys]) -> list[str]:
    """Return a sentence for each queue with jobs in the format of an earlier version, which its workers do not see.

    Raises:
        RedisError: the server is unreachable, or cannot serve now.
    """
    sentences = [
        said_of_format_1(queue, run_commands(client, [look_for_format_1(keys) for keys in own]))
        for queue, own in by_queue(partitions).items()
    ]
    return [sentence for sentence in sentences if sentence is not None]


def _clock_results(client: Client, keys: QueueKeys) -> Iterator[CheckResult]:
    """Find test clocks on the queue, which break times to live, deadlines, leases and retries."""
    config = keys.key("config")
    for name in ("test_clock_ms", "test_clock_offset_ms"):
        value = client.hget(config, name)
        if value is not None:
            found = f"{name} is {value.decode(errors='replace')}: the queue's time is not the server's"
            yield warning("queue clock", found, f"It is for tests only. Remove it: HDEL {config} {name}")


def agree_on_queue(client: Client, config: WorkerConfig, served: LoadedModel) -> None:
    """Configure which jobs the workers of the queues take, unless living workers have announced otherwise.

    Raises:
        ConfigError: They have.
    """
    for keys in partitions_of(config):
        # Notes when the settings of a new queue began, before the first one is written.
        run(client, restore_settings(keys, KnownSettings()))
        view = look_at(client, keys)
        check_compatibility(keys.queue, view, config, served.max_job_tokens)
        is_first = not view.num_workers or not view.settings.get("max_job_tokens")
        settings = QueueSettings(
            max_job_tokens=served.max_job_tokens if is_first else None,
            # Of further workers, their first heartbeat adds what they offer.
            features=served.features if is_first else None,
            partitions=config.queue.num_partitions,
            # The operator's retention settings apply whether or not other workers are alive.
            keep_prompts=config.history.keep_prompts,
            keep_results=config.history.keep_results,
        )
        run(client, configure(keys, settings))
    for queue in config.queue.names:
        check_left_out(client, queue, config.queue.num_partitions)
