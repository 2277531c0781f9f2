"""A crowded queue for each script: a tenant at its limits, jobs with all that one may have, keys of other programs."""

from collections.abc import Callable
from typing import Any

from sluice.protocol import calls
from sluice.protocol.calls import Call, KnownSettings, LeasedJob, audit
from sluice.protocol.states import JobState
from sluice.protocol.wire import End, JobId, JobSpec, encode_spec
from tests.protocol.driving import Queue, Worker, ending, new_job, packed, tokens
from tests.protocol.hostile.test_shared_keys import LAST_ID

LONG_PROMPT = 9000
"""More tokens than the tenant was charged by its estimate."""

POISON, FRAIL = "A,0,1,1;B,0,1,2;", "A,0,0,1;"
"""Deaths with a job: the next one ends it, or makes it a suspect."""


class Crowd:
    """A queue with jobs in every state, on a server that was emptied."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.keys, self.client = queue, queue.keys, queue.client
        self.client.flushall()
        queue.now_ms = 0
        queue.stop_clock()
        queue.configure(keep_prompts="full", weights={"t": 2.0})
        self.worker, self.leased = queue.worker("W"), dict[str, LeasedJob]()
        self._begin(queue.worker("D"), "orphan")
        queue.pass_time(3000)
        for name in ("dead", "again"):
            self.add(name, "x")
        self._begin(self.worker, "failed", "given", "flagged", "cut", "frail")
        self._change_jobs()
        self._limit_tenants()
        self._write_as_others()

    def add(self, name: str, tenant: str = "t", **changes: Any) -> None:  # Any: of NewJob
        """Submit a job with all that one may have."""
        self.queue.add(name, tenant, batch="b", idempotency_key=name, wants_callback=True, **changes)

    def _begin(self, worker: Worker, *names: str) -> None:
        for name in names:
            self.add(name)
        worker.beat()
        jobs = worker.pull(may_declare_dead=False).jobs
        self.leased |= {job.id.split(".")[2]: job for job in jobs}
        worker.advance(*(tokens(job, 0, 3, prompt_tokens=LONG_PROMPT) for job in jobs))

    def _change_jobs(self) -> None:
        self.worker.advance(*(ending(self.leased[name], 3, state=JobState.FAILED) for name in ("failed", "dead")))
        self.worker.give_back(self.leased["given"])
        self.queue.cancel(self.id("flagged"))
        self.queue.write_fields(self.id("cut"), deaths=POISON)
        self.queue.write_fields(self.id("frail"), deaths=FRAIL)
        self.add("waiting")
        self.add("later", not_before_ms=self.queue.now_ms + 3_600_000)

    def _limit_tenants(self) -> None:
        self.queue.configure(max_running={"t": 4, "w": 9}, tokens_per_minute={"t": 10**9, "u": 10**9, "v": 15})
        self.add("refunded", "v")
        self.worker.give_back(*self.worker.pull_only().jobs)
        self.add("late", "u", deadline_ms=self.queue.now_ms + 1000)

    def _write_as_others(self) -> None:
        key = self.keys.key
        for name in ("orphan", "given", "flagged", "waiting"):
            self.client.set(self.keys.channel(self.id(name)), "foreign")
        for stream in (self.keys.outbox, self.keys.lane(0, "t")):
            self.client.xadd(stream, {"x": "1"}, id=LAST_ID)
        for score, name in ((1e12, "heads:0"), (1e12, "ready:0"), (1, "dead"), (0, "delayed"), (0, "suspects")):
            self.client.zadd(key(name), {"nobody": score})
        self.client.set(key("members", "odd"), "foreign")
        self.client.hset(key("served"), ":0", 10**9)
        self.client.hset(key("batch", "ended"), mapping={"total": 9, "done": 1, "closed": 1, "url": "http://x"})

    def id(self, name: str) -> JobId:
        return JobId(f"0.t.{name}")

    def ids(self, *names: str) -> list[JobId]:
        return [self.id(name) for name in names]

    def run(self, *made: Call[Any]) -> None:  # Any: the replies are not looked at
        for call in made:
            self.queue.run(call)

    def lose(self, *names: str) -> None:
        """Delete keys."""
        self.client.delete(*map(self.keys.key, names))

    def beat(self, name: str, *held: JobId) -> None:
        """A worker beats, whose engine is its own."""
        about = {"model": "m", "adapters": "a", "offer": f"engine={name}"}
        beat = calls.Beat(incarnation=name, held=held, processed_pull=9, expiry_ms=60_000, about=about)
        self.run(calls.beat(self.keys, beat))

    def let_workers_die(self) -> None:
        self.queue.pass_time(9000)


def _advance(crowd: Crowd) -> None:
    again = crowd.leased["again"]
    crowd.worker.advance(
        tokens(crowd.leased["flagged"], 3, 1),
        ending(again, 3, result=None, result_bytes=9),
        ending(again, 3, state=JobState.FAILED, retry_in_ms=0),
    )


def _beat(crowd: Crowd) -> None:
    crowd.queue.step_clock(-5000)
    crowd.beat("W")


def _cancel(crowd: Crowd) -> None:
    crowd.let_workers_die()
    crowd.queue.cancel(*crowd.ids("orphan", "given", "waiting", "later"))


def _cancel_batch(crowd: Crowd) -> None:
    crowd.let_workers_die()
    crowd.run(calls.cancel_batch(crowd.keys, "b"))


def _close_batch(crowd: Crowd) -> None:
    crowd.client.hset(crowd.keys.key("batch", "ended"), "total", 1)
    crowd.run(calls.close_batch(crowd.keys, "ended"))


def _configure(crowd: Crowd) -> None:
    crowd.queue.configure(max_running={"t": 1}, weights={"u": 3.0})
    crowd.queue.configure(mode="fifo")


def _restore_settings(crowd: Crowd) -> None:
    def read(known: KnownSettings) -> KnownSettings:
        return crowd.queue.run(calls.restore_settings(crowd.keys, known))

    known = read(KnownSettings())
    crowd.lose("config", "limits", "weights")
    read(known)
    crowd.lose("config", "limits", "parked")
    read(KnownSettings(stamp=known.stamp, values={**known.values, "mode": "deadline"}))


def _give_back(crowd: Crowd) -> None:
    crowd.beat("W", *(job.id for job in crowd.leased.values()))
    crowd.client.set(crowd.keys.lane("returned", "x"), "foreign")
    crowd.worker.give_back(crowd.leased["flagged"], crowd.leased["again"])
    crowd.worker.give_back(crowd.leased["cut"], crowd.leased["frail"], broken=True)
    crowd.worker.give_back(deregister=True)


def _maintain(crowd: Crowd) -> None:
    crowd.run(calls.expire_batch(crowd.keys, "b", deadline_ms=crowd.queue.now_ms))
    crowd.let_workers_die()
    crowd.worker.maintain()


def _pull(crowd: Crowd) -> None:
    crowd.queue.pass_time(2000)
    new = crowd.queue.worker("N")
    new.pull_only(is_empty=True)
    for name in ("V", "W"):
        crowd.beat(name, *(job.id for job in crowd.leased.values()))
    crowd.client.set(crowd.keys.key("isolator"), "foreign")
    crowd.queue.submit(*(new_job(model, "w", spec=encode_spec(JobSpec(model=model))) for model in ("a", "other")))
    crowd.queue.add("lost", "w")
    crowd.client.delete(crowd.keys.payload(JobId("0.w.lost")))
    declined = [job for job in crowd.worker.pull_only(number=20).jobs if job.id == "0.w.a"]
    crowd.run(*(calls.decline(crowd.keys, "W", calls.Returned(job_id=job.id, epoch=job.epoch)) for job in declined))
    crowd.worker.pull_only(number=21)


def _put_result(crowd: Crowd) -> None:
    for offset in (0, 3):
        crowd.run(calls.put_result(crowd.keys, "W", crowd.id("cut"), 1, offset=offset, part=b"abc"))


def _report_death(crowd: Crowd) -> None:
    crowd.beat("W")
    crowd.run(calls.report_death(crowd.keys, "W"))


def _audit_jobs(crowd: Crowd) -> None:
    ids = crowd.ids("failed", "waiting", "later", "cut")
    crowd.run(audit.audit_jobs(crowd.keys, ids, {crowd.id("cut"): ("D",)}))


def _repair_jobs(crowd: Crowd) -> None:
    end = packed(3, 0, End(state=JobState.FAILED, error="it broke", error_code="broke"))
    crowd.client.xadd(crowd.keys.channel(crowd.id("cut")), {"e": end}, id="3-1")
    crowd.client.hdel(crowd.keys.key("held", "W"), crowd.id("cut"))
    crowd.lose("alive", "lane:0:u")
    crowd.run(
        audit.repair_jobs(crowd.keys, [*crowd.ids("cut", "flagged", "orphan", "later"), JobId("0.u.late")], {}),
    )


def _repair_counters(crowd: Crowd) -> None:
    for mode in ("fair", "deadline"):
        crowd.client.hset(crowd.keys.key("config"), "mode", mode)
        crowd.client.zrem(crowd.keys.key("heads", 0), "u")
        stamp = crowd.queue.run(audit.audit_counts(crowd.keys, [])).stamp
        crowd.run(audit.repair_counters(crowd.keys, [], audit.Sums(stamp=stamp, tenants=(("u", 9, 9, 9),))))


def _repair_lane(crowd: Crowd) -> None:
    for tenant in ("u", "y"):
        crowd.client.xadd(crowd.keys.lane(0, tenant), {"x": "1"})
        entries = [entry.decode() for entry, _ in crowd.client.xrange(crowd.keys.lane(0, tenant))]
        crowd.run(audit.repair_lane(crowd.keys, f"0:{tenant}", entries))


def _inspect(crowd: Crowd) -> None:
    crowd.beat("W")
    crowd.run(calls.inspect(crowd.keys))


Act = Callable[[Crowd], object]

CROWDED: dict[str, Act] = {
    "submit": lambda crowd: crowd.queue.add("odd", batch="odd", tenant="u"),
    "pull": _pull,
    "advance": _advance,
    "put_result": _put_result,
    "beat": _beat,
    "maintain": _maintain,
    "give_back": _give_back,
    "report_death": _report_death,
    "cancel": _cancel,
    "cancel_batch": _cancel_batch,
    "close_batch": _close_batch,
    "purge": lambda crowd: crowd.run(calls.purge(crowd.keys)),
    "requeue": lambda crowd: crowd.queue.requeue(crowd.id("failed"), JobId("0.x.dead")),
    "configure": _configure,
    "restore_settings": _restore_settings,
    "status": lambda crowd: crowd.run(calls.status(crowd.keys, crowd.ids("waiting", "cut"))),
    "inspect": _inspect,
    "list_limits": lambda crowd: crowd.run(calls.list_limits(crowd.keys)),
    "audit_jobs": _audit_jobs,
    "audit_counts": lambda crowd: crowd.run(audit.audit_counts(crowd.keys, [])),
    "repair_jobs": _repair_jobs,
    "repair_lane": _repair_lane,
    "repair_batches": lambda crowd: crowd.run(audit.repair_batches(crowd.keys, ["ended"])),
    "repair_counters": _repair_counters,
    "republish_events": lambda crowd: crowd.run(audit.republish_events(crowd.keys, [(crowd.id("orphan"), 0)])),
}
"""A call or some of each script for which a plain queue does not suffice."""
