"""`worker migrate-queue` moves a queue of format 1, whose keys its own code has written."""

from collections.abc import Generator
from typing import Any

import pytest

from sluice.protocol.wire import JobId
from sluice.worker.config import load_config
from sluice.worker.errors import ExitCode
from sluice.worker.queue_migration import run_migration
from tests.migration.recorded import KEYS, OLD, asked, end_workers, names_of_format_1, recorded_ms, restore
from tests.protocol.driving import Queue, check
from tests.servers import RedisServer

HOUR_MS = 3_600_000


@pytest.fixture
def client(any_redis: RedisServer) -> Generator[Any]:
    with any_redis.client() as client:
        restore(client)
        yield client


class Said(list[str]):
    """What the command prints."""

    def migrate(self, client: Any, *, wait_s: float = 0.0) -> ExitCode:
        path = client.connection_pool.connection_kwargs["path"]
        config = load_config({}, flags={"redis.url": f"unix://{path}"})
        return run_migration(config, {}, config.queue.names, wait_s=wait_s, say=self.append)


@pytest.fixture
def said() -> Said:
    return Said()


def ids_of(*kinds: str) -> list[JobId]:
    return [job_id for job_id, one in asked().items() if one.becomes in kinds]


class TestGivenAQueueOfFormat1:
    def test_when_its_worker_lives_then_the_job_that_it_runs_is_left(self, client: Any, said: Said) -> None:
        client.hset(KEYS.key("config"), "test_clock_ms", recorded_ms())

        assert said.migrate(client) is ExitCode.NOT_READY

        assert said[-1].startswith("queue 'default': 1 jobs run and 0 wait in the format of the earlier version")
        assert names_of_format_1(client) & {"job:t:running", "held:living"} == {"job:t:running", "held:living"}
        assert client.hmget(f"{OLD}:config", "max_waiting_jobs", "durability") == [
            b"0",
            b"queue default has moved to format 2 of its keys: update this program",
        ]
        assert client.hget(f"{OLD}:counters", "running_jobs") == b"1"
        assert client.hget(f"{OLD}:counters", "waiting_jobs") == b"0"

    def test_when_an_idle_worker_lives_then_the_format_has_not_ended(self, client: Any, said: Said) -> None:
        end_workers(client)
        now_ms = client.time()[0] * 1000
        client.hset(f"{OLD}:worker:idle", mapping={"beaten": now_ms, "life": 600_000})
        client.zadd(f"{OLD}:alive", {"idle": now_ms + 600_000})

        assert said.migrate(client) is ExitCode.NOT_READY

        assert "0 jobs run and 0 wait in the format of the earlier version, which 1 workers serve" in said[-1]
        assert client.type(f"{OLD}:leases") != b"string"

    def test_when_its_workers_have_ended_then_nothing_is_left(self, client: Any, said: Said) -> None:
        end_workers(client)

        assert said.migrate(client) is ExitCode.DONE

        assert said == [
            "queue 'default': moved 15 waiting jobs, 32 unread events and callbacks, 4 ended jobs",
            "queue 'default' is in format 2",
        ]
        assert names_of_format_1(client) == {"config", "leases"}
        check(Queue(client, KEYS))

    def test_when_it_is_run_again_then_nothing_changes(self, client: Any, said: Said) -> None:
        end_workers(client)
        said.migrate(client)
        before = {key: client.dump(key) for key in client.keys("*")}

        assert said.migrate(client) is ExitCode.DONE

        assert {key: client.dump(key) for key in client.keys("*")} == before
        assert said[-1] == "queue 'default' is in format 2"

    def test_when_jobs_waited_then_they_wait_in_the_same_order(self, client: Any, said: Said) -> None:
        end_workers(client)
        before = {
            lane: [fields[b"job"] for _, fields in client.xrange(f"{OLD}:lane:{lane}")]
            for lane in ("0:a", "0:b", "0:t", "3:a", "3:b")
        }

        said.migrate(client)

        after = {lane: [f[b"job"] for _, f in client.xrange(KEYS.key("lane", lane))] for lane in before}
        assert after == before
        returned = [fields[b"job"] for _, fields in client.xrange(KEYS.key("lane", "returned", "t"))]
        assert returned[0] == b"0.t.begun"
        assert client.zrange(KEYS.key("delayed"), 0, -1) == [b"0.t.later"]
        assert client.zrange(KEYS.key("suspects"), 0, -1) == [b"0.t.suspect"]

    def test_when_jobs_had_ended_then_they_are_what_they_were(self, client: Any, said: Said) -> None:
        end_workers(client)
        results = [client.get(f"{OLD}:result:t:{name}") for name in ("done", "two")]

        said.migrate(client)

        queue = Queue(client, KEYS)
        assert {str(job_id): str(queue.state(job_id)) for job_id in ids_of("done", "failed", "cancelled")} == {
            "0.t.done": "done",
            "0.t.two": "done",
            "0.t.failing": "failed",
            "0.t.cancelled": "cancelled",
        }
        assert [client.get(KEYS.key("result", "t", name)) for name in ("done", "two")] == results
        assert 0 < client.pttl(KEYS.key("job", "t", "done")) <= 24 * HOUR_MS
        assert 0 < client.pttl(KEYS.key("result", "t", "done")) <= 24 * HOUR_MS
        assert client.zrange(KEYS.key("dead"), 0, -1) == [b"0.t.failing"]
        assert queue.requeue(JobId("0.t.failing")) == [True]
        check(queue)

    def test_when_an_owner_of_format_1_died_then_a_stopped_job_ends_and_another_waits(
        self, client: Any, said: Said
    ) -> None:
        end_workers(client)

        said.migrate(client)

        queue = Queue(client, KEYS)
        assert queue.state(JobId("0.t.stopped")) == "cancelled"
        assert queue.state(JobId("0.t.orphan")) == "queued"
        assert queue.fields("t", "orphan")["previous"] == "gone"

    def test_when_settings_were_made_then_they_hold(self, client: Any, said: Said) -> None:
        end_workers(client)
        client.hset(KEYS.key("config"), "max_failures", 7)

        said.migrate(client)

        settings = Queue(client, KEYS).hash_of("config")
        assert (settings["keep_prompts"], settings["reserve_tokens"], settings["max_failures"]) == ("full", "64", "7")
        assert client.hgetall(KEYS.key("weights")) == {b"a": b"2.5"}
        assert "max_waiting_jobs" not in settings

    def test_when_a_key_is_used_again_then_it_names_the_first_job(self, client: Any, said: Said) -> None:
        end_workers(client)

        said.migrate(client)

        kept = [client.get(f"{KEYS.key('idem', 't')}:{key}").split()[:2] for key in ("k-done", "k-waiting")]
        assert kept == [[b"0.t.done", b"done"], [b"0.t.keyed", b"queued"]]
        assert client.pttl(KEYS.key("idem", "t", "k-waiting")) == -1
        assert client.pttl(KEYS.key("idem", "t", "k-done")) > 0

    def test_when_a_batch_has_moved_then_its_numbers_have_too(self, client: Any, said: Said) -> None:
        end_workers(client)

        said.migrate(client)

        queue = Queue(client, KEYS)
        closed, opened = queue.hash_of("batch", "closed"), queue.hash_of("batch", "open")
        assert (closed["total"], closed["done"], closed["closed"]) == ("2", "1", "1")
        assert (opened["total"], "closed" in opened) == ("1", False)
        assert client.zrange(KEYS.key("members", "closed"), 0, -1) == [b"0.t.batched"]

    def test_when_nobody_had_read_the_events_then_all_have_moved(self, client: Any, said: Said) -> None:
        end_workers(client)
        before = [fields for _, fields in client.xrange(f"{OLD}:outbox")]

        said.migrate(client)

        moved = [fields for _, fields in client.xrange(KEYS.outbox)]
        assert [fields for fields in moved if fields in before] == before
        assert [f[b"id"] for _, f in client.xrange(KEYS.callbacks)] == [b"0.t.two"]


class TestGivenForeignValuesInFormat1:
    def test_when_a_hash_is_no_job_then_it_is_said_and_left(self, client: Any, said: Said) -> None:
        end_workers(client)
        client.hset(f"{OLD}:job:t:keyed", "class", "12")

        assert said.migrate(client) is ExitCode.DONE

        assert "queue 'default': keys left because they hold no jobs: 1" in said
        assert "job:t:keyed" in names_of_format_1(client)
        check(Queue(client, KEYS))

    @pytest.mark.parametrize("field", ["version", "cost", "ttl", "seed", "state", "digest", "spec", "choices"])
    @pytest.mark.parametrize("value", ["", "nan", "-1", "1e300", "x" * 20_000])
    def test_when_a_field_is_foreign_then_no_row_has_it(self, client: Any, said: Said, field: str, value: str) -> None:
        end_workers(client)
        client.hset(f"{OLD}:job:t:timed", field, value)

        said.migrate(client)

        queue = Queue(client, KEYS)
        check(queue)
        for name in queue.names("job:*"):
            queue.view(JobId(name.replace("job:", "0.").replace(":", ".")))

    @pytest.mark.parametrize(
        "name",
        [
            *(
                "lane:0:t",
                "heads:0",
                "depth",
                "delayed",
                "suspects",
                "timers",
                "dead",
                "outbox",
                "callbacks",
                "counters",
            ),
            *("batch:closed", "members:closed", "idem:t:k-waiting", "payload:t:timed", "weights", "alive", "tenants"),
        ],
    )
    def test_when_a_key_has_another_type_then_the_rest_moves(self, client: Any, said: Said, name: str) -> None:
        end_workers(client)
        client.delete(f"{OLD}:{name}")
        if name == "payload:t:timed":
            client.hset(f"{OLD}:{name}", "a", "b")
        else:
            client.setrange(f"{OLD}:{name}", 0, "of another program")

        said.migrate(client)

        states = [Queue(client, KEYS).state(job_id) for job_id in ids_of("returned", "delayed", "done")]
        assert states == ["done", "done", "queued", "queued"]

    def test_when_entries_are_foreign_then_they_are_dropped(self, client: Any, said: Said) -> None:
        end_workers(client)
        for fields in ({"a": "b"}, {"job": "0.t.done", "prompt": 1, "cost": 1, "choices": 1, "at": 5}, {"job": "x"}):
            client.xadd(f"{OLD}:lane:0:a", fields)

        assert said.migrate(client) is ExitCode.DONE

        check(Queue(client, KEYS))


class TestGivenJobsThatBothFormatsHave:
    def test_when_it_is_the_same_job_then_it_is_there_once(self, client: Any, said: Said) -> None:
        end_workers(client)
        queue = Queue(client, KEYS)
        digest = client.hget(f"{OLD}:job:t:batched", "digest")
        queue.add("batched", digest=digest, batch="closed")

        assert said.migrate(client) is ExitCode.DONE

        assert queue.hash_of("batch", "closed")["total"] == "2"
        assert [f[b"job"] for _, f in client.xrange(KEYS.lane(0, "t"))].count(b"0.t.batched") == 1
        assert queue.hash_of("counters")["waiting_jobs"] == "14"

    def test_when_a_new_request_has_its_key_then_the_key_stays_with_that(self, client: Any, said: Said) -> None:
        end_workers(client)
        queue = Queue(client, KEYS)
        queue.add("new", idempotency_key="k-waiting")

        said.migrate(client)

        assert client.get(KEYS.key("idem", "t", "k-waiting")).startswith(b"0.t.new queued ")
        assert queue.state(JobId("0.t.keyed")) == "queued"
        check(queue)

    def test_when_it_is_another_job_then_it_is_said_and_left(self, client: Any, said: Said) -> None:
        end_workers(client)
        queue = Queue(client, KEYS)
        queue.add("timed")

        assert said.migrate(client) is ExitCode.MISUSED

        assert "jobs left because other jobs have their ids: 1" in said[-2]
        assert client.hget(f"{OLD}:job:t:timed", "state") == b"queued"
        assert queue.hash_of("counters")["waiting_jobs"] == "14"


class TestGivenAnotherNumberOfPartitions:
    def test_when_the_workers_now_serve_fewer_then_nothing_is_moved(self, client: Any, said: Said) -> None:
        client.hset(f"{OLD}:config", "partitions", 4)
        client.hset(KEYS.key("config"), "partitions", 2)

        with pytest.raises(Exception, match="has 4 partitions in the format of the earlier version"):
            said.migrate(client)

        assert len(client.xrange(f"{OLD}:lane:0:t")) == 3

    def test_when_no_worker_serves_it_yet_then_all_are_moved(self, client: Any, said: Said) -> None:
        end_workers(client)
        client.hset(f"{OLD}:config", "partitions", 3)

        assert said.migrate(client) is ExitCode.DONE

        assert client.hget(KEYS.key("config"), "partitions") == b"3"
        assert [client.type(f"{{default:{partition}}}:leases") for partition in range(3)] == [b"string"] * 3
