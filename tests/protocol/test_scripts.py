"""Decision "Scripts", on each server: full memory, keys of the wrong type, unknown scripts, and how calls are run."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from sluice.protocol import calls, limits, scripts
from sluice.protocol.calls import audit as audit_calls
from sluice.protocol.calls import migration
from sluice.protocol.redis.execution import no_retry, run_many
from sluice.protocol.scripts import load
from sluice.protocol.states import TRANSITIONS, JobState
from sluice.protocol.wire import JobId
from tests.integration.jobs import wait_until
from tests.protocol.driving import Queue, check, ending, new_job, tokens
from tools.scripts_page import NAMES as SCRIPTS
from tools.scripts_page import header_of

pytestmark = pytest.mark.every_server

FOLDER = Path(scripts.__file__).parent
READERS = {name for name in SCRIPTS if not header_of(name).writes}

READ = JobId("0.t.read")
NUM_ENTRIES = 3
LAST = b"9-0"

Act = Callable[[Queue], object]


def busy(queue: Queue) -> None:
    """One job of each kind: waiting, not due, running on A, failed, done, and one of a batch."""
    queue.add("failed")
    queue.add("done")
    worker = queue.worker("A")
    failed, done = worker.pull().jobs
    worker.advance(ending(failed, 0, state=JobState.FAILED), ending(done, 0, 1))
    queue.submit(new_job("running"), new_job("other"))
    worker.pull(sequences=1)
    queue.add("delayed", not_before_ms=queue.now_ms + 10)
    queue.add("batched", batch="b", ttl_ms=10)


def _running(queue: Queue) -> calls.LeasedJob:
    (job,) = [job for job in queue.worker("A").pull(number=2).jobs if job.id == "0.t.running"]
    return job


ACTS: dict[str, Act] = {
    "pull": lambda queue: queue.worker("B").pull(),
    "advance": lambda queue: queue.worker("A").advance(ending(_running(queue), 0, 3)),
    "beat": lambda queue: queue.worker("A").beat(processed=2),
    "report_death": lambda queue: queue.run(calls.report_death(queue.keys, "A")),
    "give_back": lambda queue: queue.worker("A").give_back(_running(queue), deregister=True),
    "cancel": lambda queue: queue.cancel(JobId("0.t.other"), JobId("0.t.running")),
    "requeue": lambda queue: queue.requeue(JobId("0.t.failed")),
    "configure": lambda queue: queue.configure(mode="fifo", max_waiting_jobs=7),
    "restore_settings": lambda queue: queue.run(calls.restore_settings(queue.keys, calls.KnownSettings())),
    "purge": lambda queue: queue.run(calls.purge(queue.keys)),
    "delete": lambda queue: queue.run(calls.delete(queue.keys, [JobId("0.t.done")])),
    "maintain": lambda queue: queue.fire_timers(),
    "close_batch": lambda queue: queue.run(calls.close_batch(queue.keys, "b")),
    "cancel_batch": lambda queue: queue.run(calls.cancel_batch(queue.keys, "b")),
    "expire_batch": lambda queue: queue.run(calls.expire_batch(queue.keys, "b", deadline_ms=queue.now_ms)),
    "put_result": lambda queue: queue.run(
        calls.put_result(queue.keys, "A", JobId("0.t.running"), 1, offset=0, part=b"abc")
    ),
    "count_reads": lambda queue: queue.run(calls.count_reads(queue.keys)),
    "status": lambda queue: queue.run(calls.status(queue.keys, [JobId("0.t.running")])),
    "inspect": lambda queue: queue.run(calls.inspect(queue.keys)),
    "list_workers": lambda queue: queue.run(calls.list_workers(queue.keys)),
    "list_limits": lambda queue: queue.run(calls.list_limits(queue.keys)),
    "inspect_batch": lambda queue: queue.run(calls.inspect_batch(queue.keys, "b")),
    "audit_jobs": lambda queue: queue.run(audit_calls.audit_jobs(queue.keys, [JobId("0.t.running")], {})),
    "audit_lane": lambda queue: queue.run(audit_calls.audit_lane(queue.keys, "0:t", None)),
    "audit_counts": lambda queue: queue.run(audit_calls.audit_counts(queue.keys, [])),
    "repair_jobs": lambda queue: queue.run(audit_calls.repair_jobs(queue.keys, [JobId("0.t.other")], {})),
    "repair_lane": lambda queue: queue.run(audit_calls.repair_lane(queue.keys, "0:t", ["1-1"])),
    "audit_batches": lambda queue: queue.run(audit_calls.audit_batches(queue.keys, ["b"])),
    "repair_batches": lambda queue: queue.run(audit_calls.repair_batches(queue.keys, ["b"])),
    "repair_counters": lambda queue: queue.run(audit_calls.repair_counters(queue.keys, [], audit_calls.Sums())),
    "republish_events": lambda queue: queue.run(audit_calls.republish_events(queue.keys, [(JobId("0.t.running"), 2)])),
    "close_format_1": lambda queue: queue.run(migration.close_format_1(queue.keys, "moved")),
    "migrate_lanes": lambda queue: queue.run(migration.migrate_lanes(queue.keys)),
    "migrate_jobs": lambda queue: queue.run(migration.migrate_jobs(queue.keys, [JobId("0.t.other")])),
    "migrate_batches": lambda queue: queue.run(migration.migrate_batches(queue.keys, ["b"])),
    "migrate_streams": lambda queue: queue.run(migration.migrate_streams(queue.keys)),
    "finish_format_1": lambda queue: queue.run(migration.finish_format_1(queue.keys, "moved", may_end=True)),
    "restore_prompt": lambda queue: queue.run(audit_calls.restore_prompt(queue.keys, [(JobId("0.t.other"), b"x")])),
}


class TestGivenAServerAtMaxmemory:
    def test_when_the_scripts_are_listed_then_each_has_a_test_here(self) -> None:
        assert {*ACTS, "submit"} == set(SCRIPTS)

    @pytest.mark.parametrize("name", ACTS)
    def test_when_any_script_but_submit_runs_then_it_does_all_its_work(self, queue: Queue, name: str) -> None:
        busy(queue)
        queue.pass_time(50)
        queue.client.config_set("maxmemory", 1)

        ACTS[name](queue)

        queue.client.config_set("maxmemory", 0)
        check(queue, ignored=["t:done"] if name == "delete" else [])

    def test_when_jobs_run_then_they_end_and_only_submit_is_refused(self, queue: Queue) -> None:
        queue.submit(*[new_job(f"j{i}") for i in range(5)])
        queue.client.config_set("maxmemory", 1)
        worker = queue.worker("A")

        jobs = worker.pull().jobs
        worker.advance(*[tokens(job, 0, 4) for job in jobs])
        worker.advance(*[ending(job, 4, 1) for job in jobs])
        (refused,) = queue.submit(new_job("late"))

        queue.client.config_set("maxmemory", 0)
        assert isinstance(refused, calls.Refused)
        assert queue.look().totals["done"] == 5
        check(queue)


class TestGivenAQueuesKeyOfTheWrongType:
    NAMES = ("alive", "bell", "callbacks", "counters", "dead", "delayed", "depth", "garbage", "isolator", "outbox",
             "served", "suspects", "timers")  # fmt: skip

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("script", ["submit", "pull", "beat", "cancel", "give_back"])
    def test_when_a_script_runs_then_it_says_which_and_writes_nothing(
        self, one_queue: Queue, script: str, name: str
    ) -> None:
        queue = one_queue
        key = queue.keys.key(name)
        if queue.client.type(key) != b"none":
            queue.client.delete(key)
        queue.client.rpush(key, "foreign")
        before = queue.names()
        acts: dict[str, Act] = {
            "submit": lambda queue: queue.submit(new_job("a")),
            "give_back": lambda queue: queue.worker("A").give_back(deregister=True),
            "cancel": lambda queue: queue.cancel(JobId("0.t.a")),
        }

        with pytest.raises(redis.ResponseError, match=key.replace("{", r"\{")):
            (ACTS | acts)[script](queue)

        assert queue.names() == before


class TestGivenAServerThatDoesNotKnowTheScripts:
    def test_when_calls_are_run_then_it_learns_them(self, queue: Queue) -> None:
        queue.client.script_flush()
        queue.add("a")
        queue.client.script_flush()

        assert queue.state(JobId("0.t.a")) is JobState.QUEUED
        assert all(queue.client.script_exists(load("submit").sha1, load("status").sha1)) is False
        queue.add("b")
        assert queue.client.script_exists(load("submit").sha1, load("status").sha1) == [True, True]

    def test_when_a_pipeline_is_run_then_each_gets_its_reply_in_its_place(self, queue: Queue) -> None:
        queue.client.script_flush()
        submit = calls.submit(queue.keys, [new_job("a")])
        look = calls.inspect(queue.keys)

        first, view, second = run_many(queue.client, [submit, look, submit])

        assert [type(answer) for answer in first + second] == [calls.Accepted, calls.Duplicate]
        assert view.waiting_jobs == 1

    def test_when_one_call_of_a_pipeline_fails_then_its_error_stands_in_its_place(self, queue: Queue) -> None:
        queue.client.set(queue.keys.outbox, "foreign")

        broken, view = run_many(queue.client, [calls.submit(queue.keys, [new_job("a")]), calls.status(queue.keys, [])])

        assert isinstance(broken, redis.ResponseError)
        assert view == []


class TestGivenAClientForScripts:
    def test_when_retries_are_disabled_then_it_tries_once(self) -> None:
        """redis-py repeats commands unless that is disabled; a script must never be repeated unasked."""
        attempts: list[int] = []

        def fail() -> None:
            attempts.append(1)
            raise redis.ConnectionError

        with pytest.raises(redis.ConnectionError):
            no_retry().call_with_retry(fail, lambda _: None)

        assert len(attempts) == 1


class TestGivenTheSources:
    @pytest.mark.parametrize("name", SCRIPTS)
    def test_when_a_script_is_read_then_its_header_names_effect_keys_and_reply(self, name: str) -> None:
        source = (FOLDER / f"{name}.lua").read_text()
        head = source.split("\n\n")[0]

        assert head.startswith("-- ")
        assert "-- KEYS: config" in head
        assert "-- Reply:" in head

    @pytest.mark.parametrize("name", sorted(set(SCRIPTS) - READERS - {"submit"}))
    def test_when_a_script_writes_then_its_first_act_lets_it_pass_at_maxmemory(self, name: str) -> None:
        code = [
            line
            for line in (FOLDER / f"{name}.lua").read_text().splitlines()
            if line.strip() and not line.startswith("--")
        ]

        assert code[0] == "write_even_when_full()"

    def test_when_one_needs_only_the_base_then_it_gets_no_other_library(self) -> None:
        source = load("count_reads").source

        assert "local function names_of(" in source
        assert "local function read_lease(" not in source

    @pytest.mark.parametrize("name", sorted({*SCRIPTS} - {"count_reads"}))
    def test_when_it_is_loaded_then_numbers_and_transitions_are_pythons(self, name: str) -> None:
        source = load(name).source

        assert "LIMITS." not in source
        for state, ways_out in TRANSITIONS.items():
            for to in JobState:
                # A blocked job has no row.
                is_known = to in ways_out and state is not JobState.BLOCKED
                assert (f" {state}>{to} " in source) is is_known

    def test_when_no_newer_command_may_be_used_then_none_is(self) -> None:
        newer = ("XACKDEL", "XDELEX", "LMPOP", "ZMPOP", "SINTERCARD", "EXPIRETIME", "XNACK", "HEXPIRE", "FUNCTION")
        text = "".join(path.read_text() for path in FOLDER.glob("*.lua"))

        assert [command for command in newer if f"'{command}" in text] == []

    def test_when_limits_are_read_then_a_bite_is_small(self) -> None:
        assert (limits.SLICE_JOBS, limits.MAX_JOBS_PER_CALL, limits.MAX_CALL_BYTES) == (32, 64, 2**20)


def count_of(queue: Queue) -> int:
    count = queue.run(calls.count_reads(queue.keys))
    assert count is not None
    return count


class TestGivenAChannelThatMayBeRead:
    """With one entry. `count_reads` shows whether it is read."""

    @pytest.fixture(autouse=True)
    def channel(self, queue: Queue) -> str:
        key = queue.keys.channel(READ)
        queue.client.xadd(key, {"e": "x"}, id="1-0")
        return key

    def test_when_it_is_read_then_the_count_rises_by_one(self, queue: Queue, channel: str) -> None:
        before = count_of(queue)

        queue.client.xread({channel: "0"})

        assert count_of(queue) == before + 1

    def test_when_a_reader_follows_it_then_each_entry_raises_the_count(self, queue: Queue, channel: str) -> None:
        reader = threading.Thread(target=follow, args=(queue, channel), daemon=True)
        reader.start()
        wait_until(lambda: count_of(queue), "it has read the first")

        for number in range(2, 2 + NUM_ENTRIES):
            before = count_of(queue)
            queue.client.xadd(channel, {"e": "x"}, id=f"{number}-0")
            # Until Redis 7.0 a server counts when the reader asks again, later ones when it is answered.
            wait_until(lambda before=before: count_of(queue) > before, "it is seen")
        queue.client.xadd(channel, {"e": "x"}, id=LAST.decode())
        reader.join(20)
        assert not reader.is_alive()

    def test_when_workers_and_recorders_read_then_it_stays(self, queue: Queue, channel: str) -> None:
        queue.client.xgroup_create(channel, "group", id="0")
        before = count_of(queue)

        queue.client.xreadgroup("group", "me", {channel: ">"})
        queue.client.xrange(channel)
        queue.client.xrevrange(channel)

        assert count_of(queue) == before

    def test_when_the_caller_may_not_ask_the_server_then_it_does_not_tell(self, queue: Queue) -> None:
        queue.client.acl_setuser(
            "asker", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"], reset=True
        )
        try:
            queue.client.execute_command("AUTH", "asker", "any")

            assert queue.run(calls.count_reads(queue.keys)) is None
        finally:
            queue.client.execute_command("AUTH", "default", "any")
            queue.client.acl_deluser("asker")


def follow(queue: Queue, channel: str) -> None:
    """Read entry after entry, over a connection of its own, until a last one that ends it."""
    after = b"0-0"
    while after < LAST:
        found = queue.client.xread({channel: after}, block=10_000)
        after = found[0][1][-1][0]
