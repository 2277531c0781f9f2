"""Every script with ten thousand of everything that a submitting user can make: each call stays within a stated bound.

Bounds are commands, and values that they pass, so they hold on any machine. Those of a call that handles a list are for
as many as it takes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.calls import Call, LeasedJob, QueueSettings, audit
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.costs import Cost, cost_of
from tests.protocol.driving import Queue, Worker, ending, new_job
from tests.protocol.test_costs import pull
from tests.protocol.test_scripts import SCRIPTS

CALL, SLICE, LANES, SETTINGS = (
    limits.MAX_JOBS_PER_CALL,
    limits.SLICE_JOBS,
    limits.LANES_PER_COUNT,
    limits.SETTINGS_PER_CALL,
)
HOUR_MS = 3_600_000

OF_FORMAT_1 = frozenset(
    {"close_format_1", "finish_format_1", "migrate_batches", "migrate_jobs", "migrate_lanes", "migrate_streams"}
)
"""Scripts whose keys this crowd does not have: they move a queue of an earlier version, a slice of entries a call."""

Make = Callable[["Crowd"], Call[Any]]


@dataclass(frozen=True, slots=True)
class Crowd:
    """A queue that one user has filled, with so many of each thing."""

    queue: Queue
    worker: Worker
    num: int
    held: tuple[LeasedJob, ...]
    """Jobs that the worker holds."""

    def ids(self, tenant: str, count: int) -> list[JobId]:
        return [JobId(f"0.{tenant}.j{i}") for i in range(count)]

    def lanes(self) -> list[str]:
        """As many as the audit counts in a call."""
        return [f"{i % 10}:t{i}" for i in range(LANES)]


def crowd_of(queue: Queue, num: int) -> Crowd:
    """Fill a queue."""
    worker = queue.worker("W")
    worker.beat(expiry_ms=10 * HOUR_MS)
    _fail(queue, worker, num)
    _submit(queue, "held", 2 * CALL)
    held = [job for _ in range(4) for job in worker.pull().jobs]
    _submit(queue, "wide", 2 * SLICE, choices=limits.MAX_CHOICES, batch="wide")
    wide = [job for _ in range(4) for job in worker.pull().jobs]
    worker.give_back(*wide)
    _submit(queue, "lost", num)
    _submit(queue, "late", num, deadline_ms=queue.now_ms + 1000)
    _submit(queue, "later", num, not_before_ms=queue.now_ms + HOUR_MS)
    _submit(queue, "batched", num, batch="big")
    for at in range(0, num, CALL):
        queue.submit(
            *[new_job("j0", f"t{i}", idempotency_key="k", priority=i % 10) for i in range(at, min(num, at + CALL))]
        )
    _submit(queue, "evil", 2)
    queue.configure(weights={f"t{i}": 2.0 for i in range(num)})
    _write_raw(queue, num)
    queue.pass_time(2000)
    worker.beat(*[job.id for job in held], expiry_ms=10 * HOUR_MS)
    return Crowd(queue, worker, num, tuple(held))


def _submit(queue: Queue, tenant: str, num: int, **fields: Any) -> None:  # Any: the fields of NewJob
    for at in range(0, num, CALL):
        queue.submit(*[new_job(f"j{i}", tenant, **fields) for i in range(at, min(num, at + CALL))])


def _fail(queue: Queue, worker: Worker, num: int) -> None:
    _submit(queue, "dead", num)
    while jobs := worker.pull().jobs:
        worker.advance(*[ending(job, 0, 1, state=JobState.FAILED) for job in jobs])


def _write_raw(queue: Queue, num: int) -> None:
    """Write as a user with a connection of its own may."""
    keys, pipe = queue.keys, queue.client.pipeline(transaction=False)
    many = range(num)
    for i in many:
        pipe.delete(keys.payload(JobId(f"0.lost.j{i}")))
        pipe.xadd(keys.lane(0, "evil"), {"x": "1"})
        pipe.xadd(keys.key("garbage"), {"where": "x", "what": "y"})
    junk = {f"junk{i}": "1" for i in many}
    for name in ("counters", "depth", "served", "batch:big"):
        pipe.hset(keys.key(name), mapping=junk)
    for name in ("evil:j0", "held:j0"):
        pipe.set(keys.key(f"job:{name}"), b"1q" + b"x" * num)
    for name in ("heads:5", "ready:5", "timers", "delayed", "members:big", "members:wide"):
        pipe.zadd(keys.key(name), dict.fromkeys(junk, 0))
    pipe.execute()


CALLS: dict[str, Make] = {
    "submit": lambda crowd: calls.submit(
        crowd.queue.keys,
        [new_job("j1", f"t{i}", batch="big", idempotency_key="k2", ttl_ms=HOUR_MS) for i in range(CALL)],
    ),
    "pull": lambda crowd: pull(crowd.queue, 1),
    "advance": lambda crowd: calls.advance(crowd.queue.keys, "W", [ending(job, 0, 3) for job in crowd.held[:CALL]]),
    "beat": lambda crowd: calls.beat(
        crowd.queue.keys,
        calls.Beat(incarnation="W", held=tuple(job.id for job in crowd.held), processed_pull=0, expiry_ms=HOUR_MS),
    ),
    "put_result": lambda crowd: calls.put_result(crowd.queue.keys, "W", crowd.held[-1].id, 1, offset=0, part=b"abc"),
    "give_back": lambda crowd: calls.give_back(
        crowd.queue.keys,
        "W",
        [calls.Returned(job_id=job.id, epoch=job.epoch) for job in crowd.held[CALL:]],
        deregister=False,
    ),
    "report_death": lambda crowd: calls.report_death(crowd.queue.keys, "W"),
    "cancel": lambda crowd: calls.cancel(crowd.queue.keys, crowd.ids("wide", SLICE - 1) + crowd.ids("evil", 1)),
    "purge": lambda crowd: calls.purge(crowd.queue.keys),
    "requeue": lambda crowd: calls.requeue(crowd.queue.keys, crowd.ids("dead", SLICE)),
    "delete": lambda crowd: calls.delete(crowd.queue.keys, crowd.ids("dead", 2 * SLICE)[SLICE:]),
    "maintain": lambda crowd: calls.maintain(crowd.queue.keys, overdue=crowd.ids("late", SLICE)),
    "configure": lambda crowd: calls.configure(crowd.queue.keys, QueueSettings(weights={"t1": 3.0}, max_failures=2)),
    "restore_settings": lambda crowd: calls.restore_settings(
        crowd.queue.keys, calls.KnownSettings(stamp="a1:99", values={f"weight:u{i}": "2.0" for i in range(SETTINGS)})
    ),
    "cancel_batch": lambda crowd: calls.cancel_batch(crowd.queue.keys, "big"),
    "close_batch": lambda crowd: calls.close_batch(crowd.queue.keys, "big", callback_url="http://x"),
    "expire_batch": lambda crowd: calls.expire_batch(crowd.queue.keys, "big", deadline_ms=crowd.queue.now_ms),
    "inspect_batch": lambda crowd: calls.inspect_batch(crowd.queue.keys, "big"),
    "status": lambda crowd: calls.status(crowd.queue.keys, crowd.ids("wide", SLICE)),
    "inspect": lambda crowd: calls.inspect(crowd.queue.keys),
    "list_workers": lambda crowd: calls.list_workers(crowd.queue.keys),
    "list_limits": lambda crowd: calls.list_limits(crowd.queue.keys),
    "count_reads": lambda crowd: calls.count_reads(crowd.queue.keys),
    "audit_jobs": lambda crowd: audit.audit_jobs(crowd.queue.keys, crowd.ids("wide", audit.AUDIT_SLICE_JOBS), {}),
    "audit_lane": lambda crowd: audit.audit_lane(crowd.queue.keys, "0:evil", None),
    "audit_batches": lambda crowd: audit.audit_batches(crowd.queue.keys, ["big", "wide"]),
    "audit_counts": lambda crowd: audit.audit_counts(crowd.queue.keys, crowd.lanes(), is_slice=True),
    "repair_batches": lambda crowd: audit.repair_batches(crowd.queue.keys, ["big", "wide"]),
    "repair_jobs": lambda crowd: audit.repair_jobs(crowd.queue.keys, crowd.ids("wide", SLICE), {}),
    "repair_lane": lambda crowd: audit.repair_lane(
        crowd.queue.keys,
        "0:evil",
        [one[0].decode() for one in crowd.queue.client.xrange(crowd.queue.keys.lane(0, "evil"), count=SLICE)],
    ),
    "repair_counters": lambda crowd: audit.repair_counters(
        crowd.queue.keys, crowd.lanes(), audit.Sums(), is_slice=True
    ),
    "republish_events": lambda crowd: audit.republish_events(
        crowd.queue.keys, [(job_id, 0) for job_id in crowd.ids("batched", SLICE)]
    ),
    "restore_prompt": lambda crowd: audit.restore_prompt(
        crowd.queue.keys, [(job_id, b"x") for job_id in crowd.ids("lost", SLICE)]
    ),
}


BOUNDS = {
    "submit": Cost(25 * CALL, 200 * CALL),
    "pull": Cost(2500, 25_000),
    "advance": Cost(20 * CALL, 200 * CALL),
    "beat": Cost(2500, 25_000),
    "give_back": Cost(20 * CALL, 150 * CALL),
    "report_death": Cost(50, 200),
    "put_result": Cost(30, 100),
    "cancel": Cost(40 * SLICE, 300 * SLICE),
    "purge": Cost(40 * SLICE, 300 * SLICE),
    "requeue": Cost(40 * SLICE, 300 * SLICE),
    "delete": Cost(10 * SLICE, 200 * SLICE),
    "maintain": Cost(3000, 25_000),
    "configure": Cost(50, 200),
    "cancel_batch": Cost(40 * SLICE, 300 * SLICE),
    "close_batch": Cost(60, 300),
    "expire_batch": Cost(60, 300),
    "inspect_batch": Cost(20, 100),
    "status": Cost(10 * SLICE, 200 * SLICE),
    "inspect": Cost(100, 4000),
    "list_workers": Cost(200, 4000),
    "list_limits": Cost(1000, 4000),
    "count_reads": Cost(1, 10),
    "audit_jobs": Cost(100 * audit.AUDIT_SLICE_JOBS, 600 * audit.AUDIT_SLICE_JOBS),
    "audit_lane": Cost(5 * audit.LANE_SLICE_ENTRIES, 50 * audit.LANE_SLICE_ENTRIES),
    "audit_batches": Cost(20, 100),
    "audit_counts": Cost(5 * LANES, 20 * LANES),
    "repair_counters": Cost(10 * LANES, 60 * LANES),
    "repair_batches": Cost(80, 400),
    "repair_jobs": Cost(40 * SLICE, 300 * SLICE),
    "repair_lane": Cost(10 * SLICE, 100 * SLICE),
    "republish_events": Cost(10 * SLICE, 200 * SLICE),
    "restore_prompt": Cost(10 * SLICE, 100 * SLICE),
    "restore_settings": Cost(3 * SETTINGS, 20 * SETTINGS),
}
"""The most that a call may cost, whatever is there."""

MOST = Cost(3000, 25_000)
"""The most that any bound may allow, so that no call holds the server for more than about 5 ms: a command, with what
Lua does around it, takes an idle server about 2 µs."""


def check_costs(queue: Queue, num: int, num_calls: int) -> None:
    """Run each script so many times: they work in slices."""
    crowd = crowd_of(queue, num)
    found = {name: [cost_of(queue, make(crowd)) for _ in range(num_calls)] for name, make in CALLS.items()}

    dear = {
        name: (cost, BOUNDS[name])
        for name, costs in found.items()
        for cost in costs
        if cost.commands > BOUNDS[name].commands or cost.values > BOUNDS[name].values
    }
    assert dear == {}


@pytest.fixture
def crowded(one_queue: Queue) -> Iterator[Queue]:
    yield one_queue
    one_queue.client.flushall()


class TestGivenAQueueThatItsUsersHaveFilled:
    def test_when_the_scripts_are_listed_then_each_has_a_call_and_a_bound(self) -> None:
        assert set(CALLS) == set(SCRIPTS) - OF_FORMAT_1 == set(BOUNDS)
        assert [name for name, bound in BOUNDS.items() if bound.commands > MOST.commands] == []
        assert [name for name, bound in BOUNDS.items() if bound.values > MOST.values] == []

    def test_when_each_is_called_with_some_of_everything_then_it_stays_within(self, crowded: Queue) -> None:
        check_costs(crowded, 200, 1)

    @pytest.mark.long
    @pytest.mark.timeout(600)
    def test_when_each_is_called_with_many_of_everything_then_it_stays_within(self, crowded: Queue) -> None:
        check_costs(crowded, 10_000, 3)
