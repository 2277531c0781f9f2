"""Limits of which a server has lost a part, or into which another program has written: no tenant is forgotten."""

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.calls import KnownSettings, Ok, audit
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, ending, new_job, short


@pytest.fixture
def worker(queue: Queue) -> Worker:
    """A worker that runs both jobs that a tenant may run, of which five were submitted."""
    queue.stop_clock()
    queue.configure(max_running={"few": 2}, tokens_per_minute={"few": 10_000})
    queue.submit(*[new_job(f"few{i}", "few") for i in range(5)])
    worker = queue.worker("A")
    worker.beat()
    worker.pull()
    return worker


RUNNING = (JobId("0.few.few0"), JobId("0.few.few1"))


MANY = 8_200
"""More than Lua passes to a command at once."""


@pytest.mark.long
class TestGivenAWorkerWithJobsOfManyTenantsAtTheirLimits:
    """Each may run one job, which runs, and has another one that waits."""

    def test_when_the_server_has_lost_what_runs_then_a_heartbeat_parks_them_all(self, queue: Queue) -> None:
        queue.stop_clock()
        names = [f"t{number}" for number in range(MANY)]
        queue.configure(max_running={names[0]: 1})
        queue.client.hset(queue.keys.limits, mapping=dict.fromkeys([f"max_running:{name}" for name in names], 1))
        worker, held = queue.worker("A"), list[JobId]()
        worker.beat()
        submit_to_each(queue, names, "running")
        while len(held) < MANY:
            held += [job.id for job in worker.pull(number=1 + len(held), sequences=limits.MAX_JOBS_PER_CALL).jobs]
        queue.client.delete(queue.keys.key("parked"), *(queue.keys.key("leased", name) for name in names))
        submit_to_each(queue, names, "waiting")

        worker.beat(*held)

        assert queue.client.zcard(queue.keys.key("parked")) == MANY
        assert queue.names("heads:*") | queue.names("ready:*") == set()


def submit_to_each(queue: Queue, tenants: list[str], job: str) -> None:
    """Submit a job for each tenant."""
    for first in range(0, len(tenants), limits.MAX_JOBS_PER_CALL):
        queue.submit(*(new_job(job, tenant) for tenant in tenants[first : first + limits.MAX_JOBS_PER_CALL]))


@pytest.mark.every_server
class TestGivenATenantAtItsLimit:
    def test_when_a_job_that_does_not_run_counts_then_a_heartbeat_forgets_it(self, worker: Worker) -> None:
        queue = worker.queue
        queue.client.sadd(queue.keys.key("leased", "few"), "0.few.few4", "0.few.unknown", "x")
        worker.advance(ending(worker.pull_only(number=1).jobs[0], 0, 2))
        assert worker.pull().jobs == ()

        worker.beat(RUNNING[1])

        assert short(worker.pull().jobs) == ["few2"]
        check(queue)

    def test_when_the_jobs_that_run_are_lost_then_a_heartbeat_counts_them(self, worker: Worker) -> None:
        queue = worker.queue
        queue.client.delete(queue.keys.key("leased", "few"), queue.keys.key("parked"))
        queue.add("more", "few")

        worker.beat(*RUNNING)

        assert worker.pull().jobs == ()
        check(queue)

    def test_when_it_is_listed_all_the_same_then_a_pull_parks_it(self, worker: Worker) -> None:
        queue = worker.queue
        queue.client.delete(queue.keys.key("parked"))
        queue.add("more", "few")
        assert queue.names("heads:*") == {"heads:0"}

        assert worker.pull().jobs == ()

        check(queue)

    def test_when_a_user_who_may_not_see_that_it_is_parked_lists_it_then_a_pull_does_not(self, worker: Worker) -> None:
        queue = worker.queue
        for name in ("heads", "ready"):
            queue.client.zadd(queue.keys.key(name, 0), {"few": 1})

        assert worker.pull().jobs == ()

        assert queue.names("heads:*") | queue.names("ready:*") == set()
        check(queue)

    def test_when_the_limits_are_lost_then_a_heartbeat_lists_it_again(self, worker: Worker) -> None:
        queue = worker.queue
        queue.client.delete(queue.keys.limits, queue.keys.key("leased", "few"), queue.keys.key("buckets"))
        queue.client.hdel(queue.keys.key("config"), "limited")

        worker.beat(*RUNNING)

        assert short(worker.pull().jobs) == ["few2", "few3", "few4"]
        check(queue)

    def test_when_all_settings_are_lost_then_a_worker_that_knows_them_restores_them(self, worker: Worker) -> None:
        queue = worker.queue
        known = queue.run(calls.restore_settings(queue.keys, KnownSettings()))
        assert known.values["max_running:few"] == "2"
        queue.client.delete(*[queue.keys.key(name) for name in ("config", "limits", "parked", "buckets")])
        queue.client.delete(queue.keys.key("leased", "few"))

        restored = queue.run(calls.restore_settings(queue.keys, known)).restored

        assert set(restored) >= {"max_running:few", "tokens_per_minute:few"}
        assert queue.parked() == {"few"}
        assert queue.client.smembers(queue.keys.key("leased", "few")) == {one.encode() for one in RUNNING}

    def test_when_the_queue_is_audited_then_its_lanes_are_right(self, worker: Worker) -> None:
        counts = worker.queue.run(audit.audit_counts(worker.queue.keys, []))

        assert (counts.unlisted_lanes, counts.wrong_lanes) == ((), ())

    def test_when_waiting_jobs_are_counted_again_then_its_own_count(self, worker: Worker) -> None:
        before = worker.queue.hash_of("counters")

        worker.queue.pass_time(1001)
        worker.beat(*RUNNING)

        assert worker.queue.hash_of("counters") == before
        check(worker.queue)


@pytest.mark.every_server
class TestGivenForeignValues:
    @pytest.mark.parametrize("value", ["nan", "inf", "-1", "1.5", "x", "", "1" * 400])
    def test_when_they_are_limits_then_jobs_run_without_any(self, queue: Queue, value: str) -> None:
        queue.configure(max_running={"few": 1}, tokens_per_minute={"few": 1})
        names = ("max_running:few", "tokens_per_minute:few")
        queue.client.hset(queue.keys.limits, mapping=dict.fromkeys(names, value))
        queue.submit(*[new_job(f"few{i}", "few") for i in range(3)])

        assert short(queue.worker("A").pull().jobs) == ["few0", "few1", "few2"]

    @pytest.mark.parametrize("value", ["nan 1", "inf 1", "1 nan", "x", "1 2 3", "-1e300 5", "1 99999999999999999999"])
    def test_when_it_is_a_bucket_then_it_is_full(self, queue: Queue, value: str) -> None:
        queue.configure(tokens_per_minute={"few": 60})
        queue.client.hset(queue.keys.key("buckets"), "few", value)
        queue.submit(*[new_job(f"few{i}", "few") for i in range(3)])

        assert short(queue.worker("A").pull().jobs) == ["few0", "few1"]
        check(queue)

    @pytest.mark.parametrize("name", ["limits", "leased:few", "buckets", "parked"])
    def test_when_a_key_has_another_type_then_jobs_run_and_end(self, queue: Queue, name: str) -> None:
        queue.configure(max_running={"few": 1}, tokens_per_minute={"few": 60})
        queue.client.delete(queue.keys.key(*name.split(":")))
        queue.client.xadd(queue.keys.key(*name.split(":")), {"x": "1"})
        queue.submit(*[new_job(f"few{i}", "few") for i in range(2)], new_job("other", "many"))
        worker = queue.worker("A")
        worker.beat()

        jobs = worker.pull().jobs
        worker.beat(*[job.id for job in jobs])
        answers = worker.advance(*[ending(job, 0, 2) for job in jobs])

        assert answers == [Ok(None)] * len(jobs)
        assert {"few0", "other"} <= set(short(jobs))
        assert queue.state(JobId("0.few.few0")) is JobState.DONE

    def test_when_it_is_a_parked_tenant_of_no_limit_then_its_jobs_start(self, queue: Queue) -> None:
        queue.configure(max_running={"few": 1})
        queue.client.zadd(queue.keys.key("parked"), {"many": float("inf"), "no tenant": 1, "": 2})
        queue.add("one", "many")
        worker = queue.worker("A")

        worker.beat()

        assert short(worker.pull().jobs) == ["one"]
        assert queue.parked() == set()
