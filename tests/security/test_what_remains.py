"""What a user with the rights to submit can still do to others: each line of the security page, and what ends it."""

from collections.abc import Generator
from typing import Any

import pytest
import redis
from sqlalchemy.engine import Engine

from sluice.protocol import calls, limits
from sluice.protocol.keys import QueueKeys
from sluice.protocol.packing import pack_for_script
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, encode_prompt
from tests.integration.jobs import wait_until
from tests.protocol.driving import SPEC, Queue, ending, new_job, short
from tests.security.acl import PASSWORD, QUEUE, set_users
from tests.servers import RedisServer
from tests.worker.audit.audits import Scene

VICTIM = JobId("0.victim.one")


@pytest.fixture
def queue(valkey: RedisServer) -> Generator[Queue]:
    """The page's queue, as its owner sees it."""
    set_users(valkey)
    with valkey.client() as client:
        queue = Queue(client, QueueKeys(QUEUE))
        queue.stop_clock()
        yield queue


@pytest.fixture
def hostile(queue: Queue, valkey: RedisServer) -> Generator[Any]:  # Any: redis-py's client, partly typed
    """The submitting user's connection."""
    path = str(valkey.socket_path)
    with redis.Redis(unix_socket_path=path, username="acme-submit", password=PASSWORD) as client:
        yield client


@pytest.fixture
def scene(queue: Queue, valkey: RedisServer, sqlite_history: Engine) -> Scene:
    """The queue with an empty history, which keeps prompts."""
    queue.configure(keep_prompts="full")
    return Scene(valkey, queue, sqlite_history)


def is_busy(client: Any) -> bool:  # Any: as above
    """Whether a script holds the server."""
    try:
        client.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


def fill(hostile: Any, queue: Queue) -> None:
    """Write prompts until the server refuses them."""
    for number in range(1000):
        hostile.set(queue.keys.key("payload", "acme", number), "x" * 100_000)


class TestGivenASubmittingUser:
    def test_when_it_moves_a_tenant_back_then_its_jobs_come_last(self, queue: Queue, hostile: Any) -> None:
        queue.add("one", "victim")
        queue.add("mine", "acme")
        hostile.hset(queue.keys.key("served"), "victim", 2**50)
        hostile.zadd(queue.keys.key("ready", 0), {"victim": 2**50})

        assert short(queue.worker("A").pull().jobs) == ["mine", "one"]

    def test_when_it_claims_a_full_queue_then_a_short_one_is_counted_again(self, queue: Queue, hostile: Any) -> None:
        hostile.hset(queue.keys.key("counters"), "waiting_jobs", 2**50)
        (refused,) = queue.submit(new_job("one", "victim"))
        assert isinstance(refused, calls.Refused)

        queue.worker("A").beat()

        assert queue.add("one", "victim") == VICTIM

    def test_when_it_claims_a_tenants_share_then_that_is_what_waits_at_most_and_is_counted_again(
        self, scene: Scene, hostile: Any
    ) -> None:
        claim = f"{2**50} 0 0 1"
        scene.queue.add("first", "acme")
        hostile.hset(scene.queue.keys.key("tenants"), "victim", claim)
        assert scene.queue.add("one", "victim") == VICTIM
        scene.queue.worker("A").beat()
        assert [(one[0], one[1]) for one in scene.queue.look().tenants] == [("acme", 1), ("victim", 1)]

        for number in range(40):
            scene.queue.add(f"j{number}", "victim")
        hostile.hset(scene.queue.keys.key("tenants"), "victim", claim)
        scene.record()
        scene.repair()

        scene.queue.add("two", "victim")
        assert [(one[0], one[1]) for one in scene.queue.look().tenants] == [("acme", 1), ("victim", 42)]

    def test_when_it_claims_a_full_queue_then_a_long_one_is_counted_by_the_audit(
        self, scene: Scene, hostile: Any
    ) -> None:
        for number in range(40):
            scene.queue.add(f"j{number}", "victim")
        hostile.hset(scene.queue.keys.key("counters"), "waiting_jobs", 2**50)
        scene.queue.worker("A").beat()
        (refused,) = scene.queue.submit(new_job("one", "victim"))
        assert isinstance(refused, calls.Refused)

        scene.record()
        scene.repair()

        assert scene.queue.add("one", "victim") == VICTIM

    def test_when_it_deletes_unrecorded_events_then_the_audit_restores_the_rows(
        self, scene: Scene, hostile: Any
    ) -> None:
        scene.queue.add("one", "victim")
        hostile.xadd(scene.queue.keys.outbox, {"x": "y"}, maxlen=0, approximate=False)
        scene.record()
        assert scene.state_in_history(VICTIM) is None

        scene.repair()
        scene.record()

        assert scene.state_in_history(VICTIM) == "queued"

    def test_when_a_long_outbox_takes_no_more_then_the_audit_restores_the_older_rows(
        self, scene: Scene, hostile: Any
    ) -> None:
        scene.queue.add("one", "victim")
        with hostile.pipeline(transaction=False) as pipeline:
            for _ in range(limits.OUTBOX_KEPT):
                pipeline.xadd(scene.queue.keys.outbox, {"x": "y"})
            pipeline.xadd(scene.queue.keys.outbox, {"x": "y"}, id=f"{2**64 - 1}-{2**64 - 1}")
            pipeline.execute()
        newer = scene.queue.add("two", "victim")
        scene.record()
        assert (scene.state_in_history(VICTIM), scene.state_in_history(newer)) == (None, "queued")

        scene.repair()
        scene.record()

        assert scene.state_in_history(VICTIM) == "queued"

    def test_when_it_forges_an_end_then_the_audit_restores_the_row(self, scene: Scene, hostile: Any) -> None:
        scene.queue.add("one", "victim")
        fields = {"state": "done", "error": "forged", "submitted_ms": scene.queue.view(VICTIM).submitted_ms}
        forged = ["ended", VICTIM, 50, 1, fields]
        scene.queue.worker("A").advance(ending(scene.queue.worker("A").take(), 0, 2, state=JobState.FAILED))
        hostile.xadd(scene.queue.keys.outbox, {"e": pack_for_script([forged])})
        scene.record()
        assert scene.state_in_history(VICTIM) == "done"

        scene.repair()
        scene.record()

        assert scene.state_in_history(VICTIM) == "failed"

    def test_when_it_forges_a_submit_then_a_repair_submits_it_for_that_tenant(self, scene: Scene, hostile: Any) -> None:
        fields = {"priority": 0, "prompt_tokens": 5, "cost": 9, "spec": SPEC, "seed": "1", "digest": b"d"}
        forged = ["submitted", VICTIM, 1, 1, {**fields, "prompt": encode_prompt("hello"), "submitted_ms": 1}]
        hostile.xadd(scene.queue.keys.outbox, {"e": pack_for_script([forged])})
        scene.record()

        scene.repair()

        assert scene.queue.state(VICTIM) is JobState.QUEUED

    def test_when_it_knows_a_batch_then_it_can_close_and_expire_it(self, queue: Queue, hostile: Any) -> None:
        queue.add("one", "victim", batch="nightly")
        hostile.hset(queue.keys.key("batch", "nightly"), mapping={"closed": "1", "deadline": "1"})

        (refused,) = queue.submit(new_job("two", "victim", batch="nightly"))
        queue.worker("A").pull()

        assert isinstance(refused, calls.Refused)
        assert refused.reason == "batch_closed"
        assert queue.state(VICTIM) is JobState.EXPIRED

    def test_when_it_moves_a_timer_then_the_next_beat_moves_it_back(self, queue: Queue, hostile: Any) -> None:
        queue.add("one", "victim", not_before_ms=queue.now_ms + 5000)
        hostile.zadd(queue.keys.key("timers"), {f"not_before|{VICTIM}": 2**52})
        queue.pass_time(6000)
        assert queue.worker("A").pull().jobs == ()

        queue.worker("B").beat()

        assert short(queue.worker("B").pull().jobs) == ["one"]

    def test_when_it_moves_one_of_many_timers_then_the_audit_moves_it_back(self, scene: Scene, hostile: Any) -> None:
        for number in range(40):
            scene.queue.add(f"j{number}", "victim", not_before_ms=scene.queue.now_ms + 5000)
        hostile.zadd(scene.queue.keys.key("timers"), {"not_before|0.victim.j7": 2**52})
        scene.record()

        assert scene.repair() == {("never_due", "0.victim.j7"): "put back"}

        scene.queue.pass_time(6000)
        worker = scene.queue.worker("A")
        assert len(worker.pull().jobs) + len(worker.pull().jobs) == 40

    def test_when_it_looks_then_it_learns_tenants_loads_and_ids(self, queue: Queue, hostile: Any) -> None:
        queue.add("one", "victim", deadline_ms=queue.now_ms + 60_000)

        assert hostile.zrange(queue.keys.key("timers"), 0, -1) == [f"deadline|{VICTIM}".encode()]
        assert list(hostile.hgetall(queue.keys.key("depth"))) == [b"0:victim"]

    def test_when_it_fills_the_server_then_submits_of_others_are_refused(self, queue: Queue, hostile: Any) -> None:
        queue.client.config_set("maxmemory", queue.client.info("memory")["used_memory"] + 1_000_000)
        try:
            with pytest.raises(redis.OutOfMemoryError):
                fill(hostile, queue)
            # Buffers of connections come and go: from here on what it wrote alone exceeds the limit.
            queue.client.config_set("maxmemory", queue.client.info("memory")["used_memory"] - 500_000)
            (refused,) = queue.submit(new_job("one", "victim"))
        finally:
            queue.client.config_set("maxmemory", 0)

        assert isinstance(refused, calls.Refused)
        assert refused.reason == "full_memory"

    def test_when_a_script_of_it_does_not_end_then_another_user_ends_it(
        self, queue: Queue, hostile: Any, valkey: RedisServer
    ) -> None:
        queue.client.config_set("busy-reply-threshold", 20)
        connection = hostile.connection_pool.get_connection()
        connection.send_command("EVAL", "while true do end", 0)
        with redis.Redis(unix_socket_path=str(valkey.socket_path)) as other:
            wait_until(lambda: is_busy(other), "the server is busy")

            assert other.script_kill()

        with pytest.raises(redis.ResponseError, match="killed"):
            connection.read_response()
        hostile.connection_pool.release(connection)
        assert queue.add("one", "victim") == VICTIM
