"""A queue for tests: short ways to make the calls, a clock that tests move, and a check of everything it holds."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sluice.protocol import calls, limits
from sluice.protocol.calls import Call, EndCall, LeasedJob, NewJob, Progress, PullReply, QueueSettings
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.redis.surveys import survey
from sluice.protocol.states import JobState
from sluice.protocol.wire import (
    ChannelEntry,
    End,
    JobId,
    JobRecord,
    JobSpec,
    OutboxEvent,
    decode_entry,
    decode_events,
    encode_entry,
    encode_prompt,
    encode_record,
    encode_spec,
)
from tests.chaos.checker.rows import Lease, fields_of, lease_of, row_of

Item = TypeVar("Item")
Reply = TypeVar("Reply")
SPEC = encode_spec(JobSpec())
RECORD = encode_record(JobRecord(model="m"))
CLASSES = ("returned", *map(str, range(10)))


def _per_call(items: Sequence[Item], most: int = limits.MAX_JOBS_PER_CALL) -> list[Sequence[Item]]:
    return [items[at : at + most] for at in range(0, len(items), most)]


def new_job(name: str, tenant: str = "t", **changes: Any) -> NewJob:  # Any: the fields of NewJob
    """A job of 10 prompt tokens and 20 output tokens: its cost is 30."""
    known: dict[str, Any] = {
        "id": JobId(f"0.{tenant}.{name}"),
        "spec": SPEC,
        "payload": encode_prompt(name),
        "seed": 2**64 - 1,
        "prompt_tokens": 10,
        "prompt_bytes": 40,
        "max_tokens": 20,
        "digest": name.encode(),
    }
    return NewJob(**(known | changes))


def packed(start: int, num_tokens: int, end: End | None = None) -> bytes:
    """A channel entry whose token ids are their own offsets."""
    token_ids = tuple(range(start, start + num_tokens))
    return encode_entry(start=start, token_ids=token_ids, text="x" * num_tokens, time_ms=1, end=end)


def tokens(
    job: LeasedJob, start: int, num_tokens: int, choice: int = 0, **changes: Any
) -> Progress:  # Any: of Progress
    """Progress of one choice."""
    known: dict[str, Any] = {
        "job_id": job.id,
        "epoch": job.epoch,
        "choice": choice,
        "start": start,
        "num_tokens": num_tokens,
        "entry": packed(start, num_tokens),
    }
    return Progress(**(known | changes))


def ending(
    job: LeasedJob,
    start: int,
    num_tokens: int = 0,
    choice: int = 0,
    state: JobState = JobState.DONE,
    **changes: Any,  # Any: the fields of EndCall
) -> Progress:
    """Last tokens of one choice with its end."""
    known: dict[str, Any] = {
        "state": state,
        "reason": "stop" if state is JobState.DONE else None,
        "error": None if state is JobState.DONE else "it broke",
        "error_code": None if state is JobState.DONE else "broke",
        "result": b"the result" if state is JobState.DONE else None,
        "record": RECORD,
        "output_tokens": start + num_tokens,
        "entry": packed(start + num_tokens, 0, End(state=state, finish_reason="stop")),
    }
    return tokens(job, start, num_tokens, choice, end=EndCall(**(known | changes)))


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation, as far as the scripts see it. Changes: it counts its calls."""

    queue: "Queue"
    name: str
    number: int = 0
    num_maintained: int = 0

    def pull(self, *, number: int | None = None, **changes: Any) -> PullReply:  # Any: of `maintain` and PullRequest
        """Maintain the queue, then pull."""
        self.maintain(**{name: changes.pop(name) for name in ("may_declare_dead", "until_ms") if name in changes})
        return self.pull_only(number=number, **changes)

    def pull_only(self, *, number: int | None = None, **changes: Any) -> PullReply:  # Any: the fields of PullRequest
        """Pull with much room, under the next number unless one is given."""
        if number is None:
            self.number += 1
        known: dict[str, Any] = {
            "incarnation": self.name,
            "number": self.number if number is None else number,
            "kv_tokens": 100_000,
            "prefill_tokens": 100_000,
            "sequences": 1000,
            "cache_tokens": 100_000,
            "is_empty": False,
        }
        return self.queue.run(calls.pull(self.queue.keys, calls.PullRequest(**(known | changes))))

    def maintain(self, **changes: Any) -> calls.Maintained:  # Any: the arguments of `maintain`
        """Maintain the queue: one slice."""
        self.num_maintained += 1
        known: dict[str, Any] = {
            "incarnation": self.name, "number": self.num_maintained, "may_declare_dead": True,
        }  # fmt: skip
        return self.queue.run(calls.maintain(self.queue.keys, **(known | changes)))

    def take(self, **changes: Any) -> LeasedJob:  # Any: as above
        """Pull the one job that there is."""
        (job,) = self.pull(**changes).jobs
        return job

    def advance(self, *progress: Progress) -> list[calls.AdvanceAnswer]:
        """Send progress, as much in a call as it takes."""
        sent = [self.queue.run(calls.advance(self.queue.keys, self.name, some)) for some in _per_call(progress)]
        return [answer for answers in sent for answer in answers]

    def beat(self, *held: JobId, processed: int | None = None, expiry_ms: int = 4000) -> calls.BeatReply:
        """Beat, holding these jobs, then maintain the queue without declaring a worker dead."""
        reply = self.beat_only(*held, processed=processed, expiry_ms=expiry_ms)
        self.maintain(may_declare_dead=False)
        return reply

    def beat_only(self, *held: JobId, processed: int | None = None, expiry_ms: int = 4000) -> calls.BeatReply:
        """Beat, holding these jobs."""
        number = self.number if processed is None else processed
        beat = calls.Beat(incarnation=self.name, held=held, processed_pull=number, expiry_ms=expiry_ms)
        return self.queue.run(calls.beat(self.queue.keys, beat))

    def give_back(self, *jobs: LeasedJob, deregister: bool = False, broken: bool = False) -> list[bool]:
        """Give jobs back."""
        returned = [calls.Returned(job_id=job.id, epoch=job.epoch) for job in jobs]
        return self.queue.run(
            calls.give_back(self.queue.keys, self.name, returned, deregister=deregister, broken=broken)
        )


@dataclass(slots=True, eq=False)
class Queue:
    """One partition on a real server. Changes: its clock, once stopped, is moved by hand."""

    client: Any  # Any: redis-py's own annotations are partial, and differ from version to version
    keys: QueueKeys = field(default_factory=lambda: QueueKeys("q"))
    now_ms: int = 0

    def run(self, call: Call[Reply]) -> Reply:
        """Run one call."""
        return run(self.client, call)

    def worker(self, name: str) -> Worker:
        """An incarnation."""
        return Worker(self, name)

    def stop_clock(self) -> None:
        """Stop the queue's clock an hour after the server's, which for the queue has then been up for an hour."""
        self.pass_time(3_600_000)

    def pass_time(self, ms: int) -> None:
        """Stop the queue's clock that much later, and that of heartbeats, as if other workers had beaten meanwhile."""
        if self.client.exists(self.keys.key("clock")):
            self.client.hincrby(self.keys.key("clock"), "at", ms)
            self.client.hincrby(self.keys.key("clock"), "read", ms)
        self.step_clock(ms)

    def step_clock(self, ms: int) -> None:
        """Step the server's clock alone."""
        self.now_ms = (self.now_ms or self.look().server_ms) + ms
        self.client.hset(self.keys.key("config"), "test_clock_ms", str(self.now_ms))

    def configure(self, **settings: Any) -> None:  # Any: the fields of QueueSettings
        """Write settings."""
        self.run(calls.configure(self.keys, QueueSettings(**settings)))

    def submit(self, *jobs: NewJob) -> list[calls.SubmitReply]:
        """Submit jobs, as many in a call as it takes."""
        return [answer for some in _per_call(jobs) for answer in self.run(calls.submit(self.keys, some))]

    def add(self, name: str, tenant: str = "t", **changes: Any) -> JobId:  # Any: the fields of NewJob
        """Submit one job that must be taken."""
        (answer,) = self.submit(new_job(name, tenant, **changes))
        assert isinstance(answer, calls.Accepted), answer
        return answer.id

    def views(self, job_ids: Sequence[JobId]) -> list[calls.JobView | None]:
        """Return the states of jobs."""
        slices = _per_call(job_ids, limits.SLICE_JOBS)
        return [view for some in slices for view in self.run(calls.status(self.keys, some))]

    def pause(self) -> None:
        """Stop pulls."""
        self.run(calls.pause(self.keys, is_paused=True))

    def resume(self) -> None:
        """Resume pulls."""
        self.run(calls.pause(self.keys, is_paused=False))

    def cancel(self, *job_ids: JobId, reason: str | None = None) -> list[str]:
        """Cancel jobs."""
        return self.run(calls.cancel(self.keys, job_ids, reason=reason))

    def requeue(self, *job_ids: JobId) -> list[bool]:
        """Requeue jobs from the dead set."""
        return self.run(calls.requeue(self.keys, job_ids))

    def view(self, job_id: JobId) -> calls.JobView:
        """Look at a job that must be known."""
        (view,) = self.run(calls.status(self.keys, [job_id]))
        assert view is not None
        return view

    def state(self, job_id: JobId) -> JobState:
        """Where a job is."""
        return self.view(job_id).state

    def look(self) -> calls.QueueView:
        """Look at the queue."""
        found = survey(self.client, self.keys)
        there = {name: self.keys.key(name) for name in calls.LISTS if self.client.type(self.keys.key(name)) == b"hash"}
        lists = {name: self.client.hgetall(key) for name, key in there.items()}
        listed = self.run(calls.list_limits(self.keys)).limits
        return calls.whole_view(found, found.workers, lists, {limit.tenant: limit for limit in listed})

    def fire_timers(self) -> int:
        """Fire one slice of timers."""
        return self.run(calls.maintain(self.keys)).num_fired

    def channel(self, job_id: JobId, choice: int = 0) -> list[tuple[str, ChannelEntry]]:
        """Entries of a channel with their ids."""
        return [(i.decode(), decode_entry(f[b"e"])) for i, f in self.entries(self.keys.channel(job_id, choice))]

    def entries(self, key: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Everything in a stream."""
        return self.client.xrange(key)

    def events(self, job_id: JobId | None = None) -> list[OutboxEvent]:
        """What the outbox holds, of one job or all."""
        found = [event for _, f in self.entries(self.keys.outbox) for event in decode_events(f[b"e"])]
        return [event for event in found if job_id in (None, event.job_id)]

    def names(self, pattern: str = "*") -> set[str]:
        """Names of the keys there are, without the prefix."""
        prefix = len(self.keys.prefix) + 1
        found = self.client.keys(f"{self.keys.prefix}:{pattern}")
        return {key.decode()[prefix:] for key in found}

    def hash_of(self, *name: str) -> dict[str, str]:
        """A hash as text."""
        found = self.client.hgetall(self.keys.key(*name))
        return {key.decode(): value.decode(errors="replace") for key, value in found.items()}

    def fields(self, tenant: str, name: str) -> dict[str, str]:
        """The fields of a job's row; none if there is no job."""
        row = self.client.get(self.keys.key("job", tenant, name))
        return {} if row is None else fields_of(tenant, row)

    def write_fields(self, job_id: JobId, **changes: object) -> None:
        """Change fields of a job's row, as another program may; None removes one. Its time to live stays."""
        _, tenant, name = job_id.split(".")
        changed = {**self.fields(tenant, name), **changes}
        self.client.set(
            self.keys.job(job_id),
            row_of({key: value for key, value in changed.items() if value is not None}),
            keepttl=True,
        )

    def leases(self) -> dict[JobId, tuple[str, Lease]]:
        """Owner and lease of each job that a worker holds."""
        owners = sorted(name.removeprefix("held:") for name in self.names("held:*"))
        return {
            JobId(job_id.decode()): (owner, lease_of(packed))
            for owner in owners
            for job_id, packed in self.client.hgetall(self.keys.key("held", owner)).items()
        }

    def parked(self) -> set[str]:
        """The tenants that are at their limits."""
        return {tenant.decode() for tenant in self.client.zrange(self.keys.key("parked"), 0, -1)}

    def lease(self, job_id: JobId) -> Lease | None:
        """The lease of a job."""
        return self.leases().get(job_id, ("", None))[1]


def drain(queue: Queue, worker: Worker) -> list[str]:
    """Names of all waiting jobs in the order in which pulls give them."""
    names: list[str] = []
    while jobs := worker.pull().jobs:
        names += [job.id.split(".")[2] for job in jobs]
    return names


def short(jobs: Iterable[LeasedJob]) -> list[str]:
    """Names of leased jobs."""
    return [job.id.split(".")[2] for job in jobs]


# ---------------------------------------------------------------- what must always hold


def check(queue: Queue, ignored: Sequence[str] = ()) -> None:
    """Look at every key and compare what they say of each other. `ignored`: jobs that a test has broken."""
    names = [name.removeprefix("job:") for name in queue.names("job:*")]
    jobs = {name: queue.fields(*name.split(":")) for name in names if name not in ignored}
    _check_states(queue, jobs)
    _check_counters(queue, jobs)
    _check_tenants(queue, jobs)
    _check_lanes(queue, jobs)
    _check_limits(queue)
    _check_timers(queue, jobs)
    _check_batches(queue, jobs)
    _check_events(queue, jobs)
    for name, job in jobs.items():
        _check_channels(queue, name, job)


def _id(name: str) -> JobId:
    return JobId("0." + name.replace(":", "."))


def _check_states(queue: Queue, jobs: dict[str, dict[str, str]]) -> None:
    leases = queue.leases()
    suspects = {one.decode() for one in queue.client.zrange(queue.keys.key("suspects"), 0, -1)}
    delayed = {one.decode() for one in queue.client.zrange(queue.keys.key("delayed"), 0, -1)}
    dead = {one.decode() for one in queue.client.zrange(queue.keys.key("dead"), 0, -1)}
    for name, job in jobs.items():
        job_id = _id(name)
        owner, lease = leases.get(job_id, ("", None))
        places = [job.get("entry", "") != "", job_id in suspects, job_id in delayed]
        assert (job_id in dead) <= (job["state"] == "failed"), job_id
        match job["state"]:
            case "queued":
                assert places.count(True) == 1, (job_id, places)
                assert owner == "", job_id
            case "running":
                assert not any(places), (job_id, places)
                assert owner, job_id
                assert job["owner"] == owner, job_id
                assert lease is not None
                assert lease.epoch == int(job["epoch"]), job_id
            case _:
                assert not any(places), (job_id, places)
                assert lease is None, job_id
    # A job that two workers held would be here with one of them.
    assert len(leases) == sum(queue.client.hlen(queue.keys.key(name)) for name in queue.names("held:*"))


def _check_counters(queue: Queue, jobs: dict[str, dict[str, str]]) -> None:
    counters = Counter({name: int(value) for name, value in queue.hash_of("counters").items()})
    states = Counter(job["state"] for job in jobs.values())
    waiting = [job for job in jobs.values() if job["state"] == "queued"]
    assert counters["waiting_jobs"] == states["queued"]
    assert counters["waiting_tokens"] == sum(int(job["cost"]) for job in waiting)
    assert counters["waiting_bytes"] == sum(int(job["bytes"]) for job in waiting)
    assert counters["running_jobs"] == states["running"]
    ended = counters["done"] + counters["failed"] + counters["cancelled"] + counters["expired"]
    assert counters["submitted"] == ended + counters["waiting_jobs"] + counters["running_jobs"]


def _check_tenants(queue: Queue, jobs: dict[str, dict[str, str]]) -> None:
    held: dict[str, list[int]] = {}
    for name, job in jobs.items():
        if job["state"] == "queued":
            numbers = held.setdefault(name.partition(":")[0], [0, 0, 0])
            held[name.partition(":")[0]] = [
                numbers[0] + 1, numbers[1] + int(job["cost"]), numbers[2] + int(job["bytes"]),
            ]  # fmt: skip
    stated = {tenant: [int(number) for number in text.split()[:3]] for tenant, text in queue.hash_of("tenants").items()}
    assert {tenant: numbers for tenant, numbers in stated.items() if any(numbers)} == held


def _check_lanes(queue: Queue, jobs: dict[str, dict[str, str]]) -> None:
    lanes: dict[str, list[tuple[str, dict[bytes, bytes]]]] = {}
    for name in queue.names("lane:*"):
        lanes[name.removeprefix("lane:")] = [(i.decode(), f) for i, f in queue.entries(queue.keys.key(name))]
    assert all(lanes.values()), "an empty lane was left"
    assert set(queue.hash_of("depth")) == set(lanes)
    placed = {(job["lane"], job["entry"]) for job in jobs.values() if job.get("entry")}
    assert {(lane, entry) for lane, entries in lanes.items() for entry, _ in entries} == placed
    heads = {
        f"{one}:{tenant.decode()}": score
        for one in CLASSES
        for tenant, score in queue.client.zrange(queue.keys.key("heads", one), 0, -1, withscores=True)
    }
    ready = {
        f"{one}:{tenant.decode()}"
        for one in CLASSES
        for tenant in queue.client.zrange(queue.keys.key("ready", one), 0, -1)
    }
    parked = queue.parked()
    listed = {lane: entries for lane, entries in lanes.items() if lane.partition(":")[2] not in parked}
    assert heads == {lane: float(entries[0][1][b"at"]) for lane, entries in listed.items()}
    assert ready == set(listed)
    for lane, numbers in queue.hash_of("depth").items():
        num_jobs, num_tokens, *_ = map(int, numbers.split())
        assert num_jobs == len(lanes[lane]), lane
        assert num_tokens == sum(int(job["cost"]) for job in jobs.values() if job.get("lane") == lane), lane


def _check_limits(queue: Queue) -> None:
    """Running jobs of limited tenants are known, and a tenant is parked exactly if it may start no job."""
    limits, leases, parked = queue.hash_of("limits"), queue.leases(), queue.parked()
    assert queue.hash_of("config").get("limited") == ("1" if limits else None)
    leased = {name: queue.client.smembers(queue.keys.key(name)) for name in queue.names("leased:*")}
    for name in ("max_running", "tokens_per_minute"):
        for tenant in [one.partition(":")[2] for one in limits if one.startswith(f"{name}:")]:
            running = {job_id.encode() for job_id in leases if job_id.split(".")[1] == tenant}
            if name == "max_running":
                assert leased.pop(f"leased:{tenant}", set()) == running, tenant
            is_full = len(running) >= int(limits.get(f"max_running:{tenant}", 10**12))
            is_empty = float(queue.hash_of("buckets").get(tenant, "1 0").split()[0]) <= 0
            assert (tenant in parked) or not is_full, tenant
            assert (is_full or is_empty) or tenant not in parked, tenant
    assert not leased
    assert parked <= {one.partition(":")[2] for one in limits}


def _check_timers(queue: Queue, jobs: dict[str, dict[str, str]]) -> None:
    for member in queue.client.zrange(queue.keys.key("timers"), 0, -1):
        kind, _, job_id = member.decode().partition("|")
        if kind == "batch":
            assert not queue.hash_of("batch", job_id).get("completed"), job_id
            continue
        job = jobs.get(job_id.partition(".")[2].replace(".", ":"))
        assert job is not None, member
        assert job["state"] in ("queued", "running"), (kind, job_id)


def _check_batches(queue: Queue, jobs: dict[str, dict[str, str]]) -> None:
    """A batch lists exactly its jobs that have not ended."""
    unended: dict[str, set[str]] = {}
    for name, job in jobs.items():
        if job.get("batch") and job["state"] in ("queued", "running"):
            unended.setdefault(job["batch"], set()).add(_id(name))
    listed = {name.removeprefix("members:"): queue.keys.key(name) for name in queue.names("members:*")}
    zsets = {batch: key for batch, key in listed.items() if queue.client.type(key) == b"zset"}
    assert {batch: {one.decode() for one in queue.client.zrange(key, 0, -1)} for batch, key in zsets.items()} == unended


def _check_events(queue: Queue, jobs: dict[str, dict[str, str]]) -> None:
    versions: dict[str, list[int]] = {}
    for event in queue.events():
        versions.setdefault(event.job_id, []).append(event.version)
    for name, job in jobs.items():
        assert versions[_id(name)] == list(range(1, int(job["version"]) + 1)), name


def _check_channels(queue: Queue, name: str, job: dict[str, str]) -> None:
    lease = queue.lease(_id(name))
    is_over = job["state"] not in ("queued", "running")
    # A job that never started has the channel of its first choice alone.
    for choice in range(int(job["choices"]) if job.get("attempt") else 1):
        entries = queue.channel(_id(name), choice)
        offset = 0
        for entry_id, entry in entries:
            assert entry.start == offset, (name, choice, entries)
            offset += len(entry.token_ids)
            assert entry_id.split("-")[0] == str(offset)
            assert (entry.end is None) == entry_id.endswith("-0")
        assert [entry.end is None for _, entry in entries[:-1]] == [True] * len(entries[:-1])
        if lease is not None:
            assert lease.offsets[choice] == offset, name
        if is_over and (entries or job["state"] != "done" or "silent" not in job):
            assert entries[-1][1].end is not None, name
