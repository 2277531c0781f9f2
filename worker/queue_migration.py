"""Move a queue's jobs from the format of an earlier version to the present one: `worker migrate-queue`.

Knows no job: scripts move them, a slice at a time, and this calls the scripts until nothing is left. A call that was
interrupted is repeated by the next run. Lanes are moved first, in their order; what else there is, a scan of the keys
finds.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from redis.exceptions import ResponseError

from sluice.protocol.calls.migration import (
    Remainder,
    close_format_1,
    finish_format_1,
    migrate_batches,
    migrate_jobs,
    migrate_lanes,
    migrate_streams,
)
from sluice.protocol.formats import refusal_of_format_1
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.keys import FORMAT, QueueKeys
from sluice.protocol.limits import MAX_BATCH_CHARS, SLICE_JOBS
from sluice.protocol.redis.execution import run
from sluice.protocol.wire import JobId, WireError
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import Client, connect
from sluice.worker.connection.server_checks import expecting_answers
from sluice.worker.endpoints import find_redis
from sluice.worker.errors import ConfigError, ExitCode

Item = TypeVar("Item")

PASS_EVERY_S = 1.0
"""Time between two passes while workers of the earlier version run."""

OF_WORKERS = frozenset({"worker", "serving", "rate", "members"})
"""Kinds of keys that are left when the format has ended. Others expire by themselves."""


def run_migration(
    config: WorkerConfig, environ: Mapping[str, str], names: Sequence[str], *, wait_s: float, say: Callable[[str], None]
) -> ExitCode:
    """Move queues, and report each through `say`.

    Raises:
        ConfigError: the workers of this version serve fewer partitions than those of the earlier one did.
        NotReady: Redis does not answer.
    """
    url = find_redis(config, environ).url
    client = connect(url, timeout_s=config.redis.timeout_s)
    until_s = time.monotonic() + wait_s
    with expecting_answers(url):
        codes = [_run_queue(client, name, config.queue.partitions, until_s, say) for name in names]
    return max(codes)


def _run_queue(client: Client, name: str, asked: int | None, until_s: float, say: Callable[[str], None]) -> ExitCode:
    moved = Counter[str]()
    partitions = [Partition(client, keys, moved) for keys in _partitions(client, name, asked)]
    while True:
        left = [partition.run() for partition in partitions]
        if all(one.is_ended for one in left) or time.monotonic() >= until_s:
            break
        time.sleep(PASS_EVERY_S)
    if moved:
        say(f"queue {name!r}: moved {', '.join(f'{number} {what}' for what, number in moved.items())}")
    problems = Counter[str]()
    for partition in partitions:
        problems += partition.problems
    return _report(name, left, problems, say)


def _report(name: str, left: Sequence[Remainder], problems: Counter[str], say: Callable[[str], None]) -> ExitCode:
    if number := problems["taken"]:
        say(f"queue {name!r}: jobs left because other jobs have their ids: {number}. Delete one of each")
    if number := problems["foreign"]:
        say(f"queue {name!r}: keys left because they hold no jobs: {number}")
    if all(one.is_ended for one in left):
        say(f"queue {name!r} is in format {FORMAT}")
        return ExitCode.DONE
    waiting, running = sum(one.waiting_jobs for one in left), sum(one.running_jobs for one in left)
    workers = max(one.living_workers for one in left)
    say(
        f"queue {name!r}: {running} jobs run and {waiting} wait in the format of the earlier version, which {workers} "
        "workers serve. Stop these, and run this again (or with --wait)"
    )
    return ExitCode.NOT_READY if workers or running else ExitCode.MISUSED


def _partitions(client: Client, name: str, asked: int | None) -> list[QueueKeys]:
    """List the partitions that workers of either format have stated they serve.

    Raises:
        ConfigError: those of this version serve fewer.
    """
    first = QueueKeys(name)
    stated = [client.hget(f"{prefix}:config", "partitions") for prefix in (first.prefix_of_format_1, first.prefix)]
    before, now = (int(value) if value and value.isdigit() else 0 for value in stated)
    now = asked or now
    if now and before > now:
        raise ConfigError(
            [
                f"SLUICE_PARTITIONS: queue {name!r} has {before} partitions in the format of the earlier "
                f"version, and its workers now serve {now}: start these with {before}"
            ]
        )
    return [QueueKeys(name, partition) for partition in range(before or now or 1)]


class Partition:
    """One partition. Changes: it counts what was moved, and what could not be."""

    def __init__(self, client: Client, keys: QueueKeys, moved: Counter[str]) -> None:
        self.problems = Counter[str]()
        """Of the last pass, by the answer of the script."""

        self._client = client
        self._keys = keys
        self._moved = moved
        self._sentence = refusal_of_format_1(keys.queue)

    def run(self) -> Remainder:
        """Move all that can be moved now; return what is left.

        Raises:
            RedisError: the server does not answer.
        """
        run(self._client, close_format_1(self._keys, self._sentence))
        self._move_lanes()
        self._move_streams()
        answers = self._move_found()
        self.problems = Counter({what: answers[what] for what in ("taken", "foreign") if answers[what]})
        may_end = not answers["running"] and not answers["taken"]
        left = run(self._client, finish_format_1(self._keys, self._sentence, may_end=may_end))
        if left.is_ended:
            self._delete_rest()
        return left

    def _move_lanes(self) -> None:
        while (moved := run(self._client, migrate_lanes(self._keys))).has_more:
            self._count("waiting jobs", moved.num_moved)

    def _move_streams(self) -> None:
        while number := run(self._client, migrate_streams(self._keys)):
            self._count("unread events and callbacks", number)

    def _move_found(self) -> Counter[str]:
        """Move the jobs and batches that a scan finds; return how many jobs had which answer."""
        answers = Counter[str]()
        for names in _in_slices(self._batches()):
            run(self._client, migrate_batches(self._keys, names))
        for job_ids in _in_slices(self._jobs()):
            answers += self._move_jobs(job_ids)
        self._count("waiting jobs", answers["waiting"])
        self._count("ended jobs", answers["ended"])
        return answers

    def _move_jobs(self, job_ids: Sequence[JobId]) -> Counter[str]:
        answers = Counter[str]()
        left: list[JobId] = list(job_ids)
        while left:
            found = run(self._client, migrate_jobs(self._keys, left))
            answers.update(answer for answer in found if answer != "again")
            left = [job_id for job_id, answer in zip(left, found, strict=True) if answer == "again"]
        return answers

    def _count(self, what: str, number: int) -> None:
        if number:
            self._moved[what] += number

    # ------------------------------------------------------------ what there is

    def _names(self) -> Iterator[tuple[str, str]]:
        """Yield kind and rest of the name of each key of the earlier format."""
        prefix = self._keys.prefix_of_format_1
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", prefix) + ":*"
        for key in self._client.scan_iter(match=pattern, count=500):
            kind, _, rest = key[len(prefix) + 1 :].decode(errors="replace").partition(":")
            if not kind.isdigit():
                yield kind, rest

    def _batches(self) -> Iterator[str]:
        return (rest for kind, rest in self._names() if kind == "batch" and len(rest) <= MAX_BATCH_CHARS)

    def _jobs(self) -> Iterator[JobId]:
        for kind, rest in self._names():
            if kind == "job" and (job_id := self._job_id(rest.replace(":", "."))):
                yield job_id
        for name in ("delayed", "suspects"):
            # Another program's key may be in its place.
            with suppress(ResponseError):
                for member, _ in self._client.zscan_iter(f"{self._keys.prefix_of_format_1}:{name}"):
                    yield JobId(member.decode(errors="replace"))

    def _job_id(self, names: str) -> JobId | None:
        job_id = JobId(f"{self._keys.partition}.{names}")
        try:
            split_job_id(job_id)
        except WireError:
            return None
        return job_id

    def _delete_rest(self) -> None:
        rest = (f"{self._keys.prefix_of_format_1}:{kind}:{rest}" for kind, rest in self._names() if kind in OF_WORKERS)
        for names in _in_slices(rest):
            self._client.delete(*names)


def _in_slices(items: Iterable[Item]) -> Iterator[list[Item]]:
    rest = iter(items)
    while part := list(islice(rest, SLICE_JOBS)):
        yield part
