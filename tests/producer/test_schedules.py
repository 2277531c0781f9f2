"""Schedules on a real server: each run once, whichever process fires it or dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from textwrap import dedent
from typing import Any

import pytest

from sluice.producer import InvalidJob, InvalidSchedule, InvalidSetting, Producer, ScheduleNotFound, job
from sluice.producer.operations import schedules
from sluice.producer.operations.operation import Ask
from sluice.producer.operations.schedules import ScheduleView
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run_commands
from sluice.protocol.schedules import firing
from sluice.protocol.schedules.firing import Look, ScheduleWatch
from sluice.protocol.schedules.schedule import ScheduleKeys, new_revision, pack_schedule, read_schedule
from sluice.protocol.wire import decode_prompt
from sluice.worker.connection.clients import connect
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

KEYS = ScheduleKeys(QueueKeys("default"))
EVERY_MINUTE, EVERY_YEAR = "* * * * *", "0 0 1 1 *"
CHANGES: dict[str, Callable[[Producer], object]] = {
    "added": lambda producer: producer.add_schedule("other", ["hello"], cron=EVERY_YEAR),
    "paused": lambda producer: producer.pause_schedule("report"),
    "removed": lambda producer: producer.remove_schedule("report"),
}
OneLook = Callable[[], tuple[Look, list[str]]]
TOO_LONG = (5,) * 600
"""A prompt of token ids, so that the queue knows its length."""


def minutes_ago(client: Any, count: int) -> int:
    """The Unix time of a whole minute, by the server's clock."""
    return (client.time()[0] // 60 - count) * 60


def each_hour_at(*times_s: int) -> str:
    """A rule for the minutes of some times, so that none is added while a test runs."""
    return ",".join(str(time_s // 60 % 60) for time_s in times_s) + " * * * *"


def add(
    producer: Producer,
    name: str = "report",
    prompts: Sequence[str] = ("hello",),
    *,
    cron: str = EVERY_MINUTE,
    **options: Any,
) -> ScheduleView:
    """Add a schedule, for every minute unless told otherwise."""
    return producer.add_schedule(name, prompts, cron=cron, **options)


def last_fired(client: Any, count: int, name: str = "report", *, tenant: str = "default") -> None:
    """Make as if the last time fired was some minutes ago."""
    last_fired_at(client, minutes_ago(client, count), name, tenant=tenant)


def last_fired_at(client: Any, last_s: int, name: str = "report", *, tenant: str = "default") -> None:
    """Make as if the last time fired was this one: the schedule was added a minute before that."""
    id_ = f"{tenant}.{name}"
    rule = replace(read_schedule(id_, client.hget(KEYS.schedules, id_)), created_s=last_s - 60)
    client.hset(KEYS.schedules, mapping=dict([(id_, pack_schedule(rule)), new_revision()]))
    client.zadd(KEYS.times, {id_: last_s})


def waiting(worker: HandWorker) -> list[str]:
    """The ids of all waiting jobs, which this takes."""
    return [leased.id for leased in worker.pull()]


class TestGivenAScheduleWithADueTime:
    """It runs at this minute of each hour, and nobody has fired it since."""

    @pytest.fixture(autouse=True)
    def run_s(self, producer: Producer, redis_client: Any) -> int:
        run_s = minutes_ago(redis_client, 0)
        add(producer, prompts=["one", "two"], cron=each_hour_at(run_s))
        last_fired_at(redis_client, run_s - 60)
        return run_s

    def test_when_it_is_fired_then_its_jobs_wait_under_ids_of_schedule_and_time(
        self, producer: Producer, worker: HandWorker, run_s: int
    ) -> None:
        look = producer.fire_schedules()

        jobs = worker.pull()
        assert [leased.id for leased in jobs] == [f"0.default.report-{run_s}", f"0.default.report-{run_s}-1"]
        assert [decode_prompt(leased.payload) for leased in jobs] == ["one", "two"]
        assert [fired.time_s for fired in look.fired] == [run_s]
        assert producer.schedule("report").last_run == datetime.fromtimestamp(run_s, UTC)

    def test_when_many_fire_at_once_then_there_is_one_run(
        self, valkey: RedisServer, worker: HandWorker, run_s: int
    ) -> None:
        clients = [Producer(valkey.url) for _ in range(8)]
        with ThreadPoolExecutor(8) as threads:
            looks = [*threads.map(Producer.fire_schedules, clients)]
        for client in clients:
            client.close()

        assert any(look.fired for look in looks)
        assert waiting(worker) == [f"0.default.report-{run_s}", f"0.default.report-{run_s}-1"]

    def test_when_two_are_at_the_same_step_then_there_is_one_run(
        self, valkey: RedisServer, worker: HandWorker, run_s: int
    ) -> None:
        client = connect(valkey.url, timeout_s=10)
        both = [ScheduleWatch(QueueKeys("default")).fire(Look()) for _ in range(2)]
        commands = [next(steps) for steps in both]
        while any(commands):
            for place, steps in enumerate(both):
                if commands[place]:
                    replies = run_commands(client, commands[place])
                    try:
                        commands[place] = steps.send(replies)
                    except StopIteration:
                        commands[place] = ()
        client.close()

        assert waiting(worker) == [f"0.default.report-{run_s}", f"0.default.report-{run_s}-1"]

    def test_when_a_process_is_killed_before_it_notes_a_run_then_another_does(
        self, valkey: RedisServer, producer: Producer, worker: HandWorker, redis_client: Any, run_s: int
    ) -> None:
        program = """
            import os, signal, sys
            from sluice.producer import Producer
            from sluice.producer.operations.operation import Ask
            from sluice.producer.operations.schedules import fire, watch_of

            def until_the_note(operation):
                step = next(operation)
                while True:
                    if isinstance(step, Ask) and step.commands[0][0] == "ZADD":
                        os.kill(os.getpid(), signal.SIGKILL)
                    step = operation.send((yield step))

            producer = Producer(sys.argv[1])
            producer.run(until_the_note(fire(watch_of(producer.target))))
        """
        environ = {**os.environ, "SLUICE_REDIS_URL": valkey.url}
        command = [sys.executable, "-P", "-c", dedent(program), valkey.url]
        killed = subprocess.run(command, env=environ, timeout=60, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert redis_client.zscore(KEYS.times, "default.report") == run_s - 60
        first = waiting(worker)

        producer.fire_schedules()

        assert first == [f"0.default.report-{run_s}", f"0.default.report-{run_s}-1"]
        assert waiting(worker) == []
        assert redis_client.zscore(KEYS.times, "default.report") == run_s

    def test_when_the_queue_is_full_then_it_runs_once_there_is_room(
        self, producer: Producer, worker: HandWorker, redis_client: Any, run_s: int
    ) -> None:
        redis_client.hset(QueueKeys("default").key("config"), "max_waiting_jobs", 1)
        refused = producer.fire_schedules()
        redis_client.hdel(QueueKeys("default").key("config"), "max_waiting_jobs")

        fired = producer.fire_schedules()

        assert [problem.message for problem in refused.problems] == ["the queue holds 1 jobs and takes 1"]
        assert [run.time_s for run in fired.fired] == [run_s]
        assert waiting(worker) == [f"0.default.report-{run_s}", f"0.default.report-{run_s}-1"]

    def test_when_a_foreign_key_is_in_the_place_of_a_lane_then_it_runs_once_that_is_removed(
        self, producer: Producer, worker: HandWorker, redis_client: Any, run_s: int
    ) -> None:
        lane = QueueKeys("default").lane(0, "default")
        redis_client.set(lane, "foreign")
        refused = producer.fire_schedules()
        redis_client.delete(lane)

        fired = producer.fire_schedules()

        assert [problem.message for problem in refused.problems] == [f"{lane} has a different type"]
        assert [run.time_s for run in fired.fired] == [run_s]
        assert waiting(worker) == [f"0.default.report-{run_s}", f"0.default.report-{run_s}-1"]

    def test_when_one_of_its_jobs_is_refused_for_good_then_the_others_are_a_run(
        self, producer: Producer, worker: HandWorker, redis_client: Any, run_s: int
    ) -> None:
        producer.add_schedule("report", ["one", TOO_LONG], cron=each_hour_at(run_s))
        redis_client.hset(QueueKeys("default").key("config"), "max_job_tokens", 500)

        look = producer.fire_schedules()

        assert waiting(worker) == [f"0.default.report-{run_s}"]
        assert [run.time_s for run in look.fired] == [run_s]
        assert producer.schedule("report").last_run == datetime.fromtimestamp(run_s, UTC)
        (problem,) = look.problems
        assert problem.message.startswith(f"a job of the run of {run_s} was refused: ")

    def test_when_all_its_jobs_are_refused_for_good_then_it_is_left_out(
        self, producer: Producer, worker: HandWorker, redis_client: Any, run_s: int
    ) -> None:
        producer.add_schedule("report", [TOO_LONG], cron=each_hour_at(run_s))
        redis_client.hset(QueueKeys("default").key("config"), "max_job_tokens", 500)

        look = producer.fire_schedules()

        assert (waiting(worker), look.fired, producer.schedule("report").last_run) == ([], [], None)
        (problem,) = look.problems
        assert problem.message.startswith(f"the run of {run_s} was refused: ")

    def test_when_it_is_paused_then_it_does_not_run_and_later_neither(self, producer: Producer, run_s: int) -> None:
        producer.pause_schedule("report")
        while_paused = producer.fire_schedules().fired, producer.schedule("report").paused
        producer.pause_schedule("report", is_paused=False)

        late = producer.fire_schedules()

        assert while_paused == ([], True)
        assert not producer.schedule("report").paused
        assert run_s not in [fired.time_s for fired in late.fired]

    def test_when_it_is_removed_then_it_does_not_run(self, producer: Producer, worker: HandWorker) -> None:
        producer.remove_schedule("report")

        assert producer.fire_schedules().fired == []
        assert waiting(worker) == []
        assert producer.schedules() == []
        with pytest.raises(ScheduleNotFound, match="has no schedule 'report'"):
            producer.remove_schedule("report")

    def test_when_the_same_rule_is_added_again_then_what_is_due_still_runs(
        self, producer: Producer, worker: HandWorker, run_s: int
    ) -> None:
        add(producer, prompts=["three"], cron=each_hour_at(run_s))

        producer.fire_schedules()

        assert [decode_prompt(leased.payload) for leased in worker.pull()] == ["three"]

    def test_when_another_entry_is_damaged_then_it_runs_and_the_other_is_a_problem(
        self, producer: Producer, worker: HandWorker, redis_client: Any, run_s: int
    ) -> None:
        redis_client.hset(KEYS.schedules, mapping={"default.a": b"\xff", "default.z": b"\x80", "nonsense": b"x"})

        look = producer.fire_schedules()

        assert {problem.schedule_id for problem in look.problems} == {"default.a", "default.z", "nonsense"}
        assert len(waiting(worker)) == 2


class TestGivenAProcessThatLooksEachSecond:
    """It knows a schedule that is not due."""

    @pytest.fixture
    def look(self, producer: Producer, valkey: RedisServer) -> Generator[OneLook]:
        """Look once; return what was done, and the commands."""
        with closing(connect(valkey.url, timeout_s=10)) as client:
            watch = ScheduleWatch(QueueKeys("default"))

            def look() -> tuple[Look, list[str]]:
                done, names = Look(), list[str]()
                steps = watch.fire(done)
                with suppress(StopIteration):
                    commands = next(steps)
                    while True:
                        names += [str(command[0]) for command in commands]
                        commands = steps.send(run_commands(client, commands))
                return done, names

            producer.add_schedule("report", ["hello"], cron=EVERY_YEAR)
            look()
            yield look

    def test_when_nothing_has_changed_then_it_does_not_read_the_rules(self, look: OneLook) -> None:
        done, names = look()

        assert names == ["TIME", "HGET"]
        assert (done.fired, done.problems) == ([], [])

    @pytest.mark.parametrize("change", CHANGES)
    def test_when_a_schedule_is_changed_then_it_reads_the_rules_once(
        self, producer: Producer, look: OneLook, change: str
    ) -> None:
        CHANGES[change](producer)

        assert "HGETALL" in look()[1]
        assert "HGETALL" not in look()[1]

    def test_when_a_schedule_is_resumed_then_it_reads_the_rules(self, producer: Producer, look: OneLook) -> None:
        producer.pause_schedule("report")
        look()
        producer.pause_schedule("report", is_paused=False)

        assert "HGETALL" in look()[1]

    def test_when_it_becomes_due_then_it_runs(self, producer: Producer, redis_client: Any, look: OneLook) -> None:
        run_s = minutes_ago(redis_client, 0)
        add(producer, "other", cron=each_hour_at(run_s))
        last_fired_at(redis_client, run_s - 60, "other")

        assert [fired.time_s for fired in look()[0].fired] == [run_s]

    def test_when_another_program_has_changed_a_rule_then_it_is_noticed_later(
        self, redis_client: Any, look: OneLook, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        redis_client.hset(KEYS.schedules, "default.a", b"\xff")
        before, _ = look()
        monkeypatch.setattr(firing, "READ_EVERY_S", 0)

        after, _ = look()
        monkeypatch.undo()
        again, names = look()

        assert before.problems == []
        assert [problem.schedule_id for problem in after.problems] == ["default.a"]
        assert (again.problems, names) == (after.problems, ["TIME", "HGET"])


class TestGivenAnOutageOfFiveMinutes:
    """Nobody has fired for that long."""

    @pytest.fixture
    def times_s(self, redis_client: Any) -> list[int]:
        newest_s = minutes_ago(redis_client, 0)
        return [newest_s - 60 * count for count in (4, 3, 2, 1, 0)]

    def fired(self, producer: Producer, client: Any, times_s: Sequence[int], **options: Any) -> list[int]:
        add(producer, cron=each_hour_at(*times_s), **options)
        last_fired_at(client, times_s[0] - 60)
        look = producer.fire_schedules()
        assert look.problems == []
        assert producer.fire_schedules().fired == []
        return [run.time_s for run in look.fired]

    def test_when_the_rule_is_latest_then_the_newest_time_runs(
        self, producer: Producer, redis_client: Any, times_s: list[int]
    ) -> None:
        assert self.fired(producer, redis_client, times_s, misfire="latest") == times_s[-1:]

    def test_when_the_rule_is_all_then_each_time_runs(
        self, producer: Producer, redis_client: Any, times_s: list[int]
    ) -> None:
        assert self.fired(producer, redis_client, times_s, misfire="all") == times_s

    def test_when_runs_may_not_overlap_then_only_the_first_of_all_runs(
        self, producer: Producer, redis_client: Any, times_s: list[int]
    ) -> None:
        assert self.fired(producer, redis_client, times_s, misfire="all", overlap="skip") == times_s[:1]


class TestGivenADailyScheduleThatNobodyFired:
    """Its last time passed two minutes ago."""

    @pytest.mark.parametrize(("misfire", "num_runs"), [("skip", 0), ("latest", 1)])
    def test_when_it_is_fired_late_then_the_misfire_rule_decides(
        self, producer: Producer, redis_client: Any, misfire: Any, num_runs: int
    ) -> None:
        due = datetime.fromtimestamp(minutes_ago(redis_client, 2), UTC)
        producer.add_schedule("report", ["hello"], cron=f"{due.minute} {due.hour} * * *", misfire=misfire)
        last_fired(redis_client, 10)

        assert len(producer.fire_schedules().fired) == num_runs
        assert producer.fire_schedules().fired == []


class TestGivenAScheduleWhoseRunsDoNotOverlap:
    """It has run once."""

    @pytest.fixture(autouse=True)
    def schedule(self, producer: Producer, redis_client: Any) -> None:
        add(producer, overlap="skip")
        last_fired(redis_client, 1)
        assert len(producer.fire_schedules().fired) == 1

    @pytest.fixture
    def due_again(self, redis_client: Any) -> None:
        """As if the minute of that run had come again."""
        run_s = int(redis_client.zscore(KEYS.times, "default.report:run"))
        redis_client.zadd(KEYS.times, {"default.report": run_s - 60})

    @pytest.mark.usefixtures("due_again")
    def test_when_its_job_waits_or_runs_then_a_due_time_is_left_out(
        self, producer: Producer, worker: HandWorker
    ) -> None:
        while_waiting = producer.fire_schedules()
        [leased] = worker.pull()
        while_running = producer.fire_schedules()

        assert (while_waiting.fired, while_running.fired) == ([], [])
        worker.generate(leased)
        assert waiting(worker) == []

    def test_when_its_job_has_ended_then_the_next_time_runs(
        self, producer: Producer, worker: HandWorker, redis_client: Any
    ) -> None:
        run_s = int(redis_client.zscore(KEYS.times, "default.report:run"))
        redis_client.zadd(KEYS.times, {"default.report": run_s - 120})
        [leased] = worker.pull()
        worker.generate(leased)

        assert len(producer.fire_schedules().fired) == 1


class TestGivenAClient:
    def test_when_a_schedule_is_added_then_its_next_runs_are_in_its_zone(self, producer: Producer) -> None:
        view = producer.add_schedule("daily", ["hello"], cron="0 9 * * *", tz="Europe/Berlin")

        [listed] = producer.schedules(num_next=2)
        assert (listed.name, listed.tenant, listed.num_jobs, listed.last_run) == ("daily", "default", 1, None)
        assert [moment.hour for moment in listed.next_runs] == [9, 9]
        assert listed.next_runs[0] == view.next_runs[0]
        assert listed.next_runs[1] - listed.next_runs[0] >= timedelta(hours=23)

    def test_when_it_asks_for_one_then_it_reads_no_other(self, producer: Producer) -> None:
        add(producer, "one")
        add(producer, "two")

        step = next(schedules.find(producer.target, "one", "default"))

        assert isinstance(step, Ask)
        assert [command[0] for command in step.commands] == ["TIME", "HGET", "HGET", "ZSCORE"]

    def test_when_it_lists_a_tenants_then_it_sees_no_others(self, producer: Producer) -> None:
        add(producer, "same", tenant="acme")
        add(producer, "same", tenant="bold")

        assert [view.tenant for view in producer.schedules(tenant="acme")] == ["acme"]
        assert [view.tenant for view in producer.schedules()] == ["acme", "bold"]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"cron": "soon"}, "is not a cron rule"),
            ({"tz": "Mars/Olympus"}, "there is no time zone 'Mars/Olympus'"),
            ({"name": "a.b"}, "a schedule's name is"),
            ({"misfire": "never"}, "misfire must be one of latest, all, skip"),
            ({"overlap": "never"}, "overlap must be one of allow, skip"),
        ],
    )
    def test_when_a_value_is_wrong_then_a_sentence_says_so(
        self, producer: Producer, changes: dict[str, Any], reason: str
    ) -> None:
        values: dict[str, Any] = {"name": "report", "jobs": ["hello"], "cron": "@daily", **changes}

        with pytest.raises(InvalidSchedule, match=reason):
            producer.add_schedule(**values)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"job_id": "0.default.a"}, "neither job_id nor idempotency_key"),
            ({"idempotency_key": "a"}, "neither job_id nor idempotency_key"),
            ({"deadline": datetime(2030, 1, 1, tzinfo=UTC)}, "deadline of a scheduled job must be a time after"),
            ({"tenant": "other"}, "must be one of its tenant"),
            ({"max_tokens": 0}, r"jobs\[0\]: max_tokens must be"),
        ],
    )
    def test_when_a_job_cannot_be_repeated_then_a_sentence_says_so(
        self, producer: Producer, options: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(InvalidJob, match=reason):
            producer.add_schedule("report", [job("hello", **options)], cron="@daily")

    def test_when_a_run_has_a_deadline_then_it_counts_from_the_run(
        self, producer: Producer, worker: HandWorker, redis_client: Any
    ) -> None:
        add(producer, deadline=timedelta(minutes=5), seed=7, priority=3, max_tokens=9)
        last_fired(redis_client, 1)

        producer.fire_schedules()

        [leased] = worker.pull()
        now_ms = redis_client.time()[0] * 1000
        assert leased.deadline_ms is not None
        assert 0 < leased.deadline_ms - now_ms <= 301_000
        assert (leased.seed, leased.priority) == (7, 3)


class TestGivenAClientWithoutCroniter:
    """As `pip install sluice-llm` leaves it."""

    def test_when_a_schedule_is_added_then_a_sentence_names_the_extra(
        self, producer: Producer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "croniter", None)

        with pytest.raises(InvalidSetting, match=r"pip install 'sluice-llm\[schedules\]'"):
            add(producer, cron="7 7 7 7 7")  # no test has checked it before

    def test_when_jobs_are_submitted_then_croniter_is_not_imported(self, valkey: RedisServer) -> None:
        submit = "import sys; from sluice.producer import Producer; Producer(sys.argv[1]).submit('hello')"
        program = f"{submit}; print(*sys.modules)"

        ended = subprocess.run(
            [sys.executable, "-P", "-c", program, valkey.url], capture_output=True, text=True, timeout=60, check=True
        )

        assert "sluice.protocol.schedules.rule" in ended.stdout.split()
        assert "croniter" not in ended.stdout.split()
