"""The exchange's rounds under load and delays, on a real server, with a loop that tests advance."""

import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from sluice.engine.request import FailureKind, Finish, FinishReason, Room, SequenceStats, TokenDelta
from sluice.protocol import calls, limits
from sluice.protocol.calls import Call
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from sluice.worker.clock import ServerClock, monotonic_s
from sluice.worker.config import load_config
from sluice.worker.connection import availability
from sluice.worker.connection.availability import RedisHealth
from sluice.worker.connection.clients import Connections
from sluice.worker.connection.listeners import NotificationListener
from sluice.worker.connection.unavailable_partitions import UnavailablePartitions
from sluice.worker.errors import WorkerBroken
from sluice.worker.jobs.channel import MAX_ENTRY_TOKENS
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.jobs.reader_watch import KEPT_S
from sluice.worker.jobs.results import Origin
from sluice.worker.log import get_log
from sluice.worker.serve import round_trips as trips
from sluice.worker.serve.context import WorkerContext
from sluice.worker.serve.exchange import Exchange
from sluice.worker.serve.give_back import ReturnQueue
from sluice.worker.serve.mailbox import Mailbox
from sluice.worker.serve.metrics import Meters
from sluice.worker.serve.pull import Pulling
from sluice.worker.watchdog import Watchdog
from tests.integration.jobs import KEYS, Ask, read_channel, state_of, submit_all, wait_until
from tests.protocol.driving import Queue
from tests.servers import RedisServer

ROOM = Room(kv_tokens=10_000, prefill_tokens=10_000, sequences=100)
PROMPT_TOKENS = 10


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Running:
    """An exchange and all it needs; jobs that were pulled lie in `taken`. Changes with the test."""

    def __init__(
        self,
        url: str,
        *,
        max_buffered_bytes: int = 2**30,
        life_s: float = 0.4,
        stream_interval_s: float = 0.02,
        unread_interval_s: float = 0.0,
        partitions: tuple[QueueKeys, ...] = (KEYS,),
    ) -> None:
        flags = {
            "redis.url": url,
            "redis.stream_interval_s": stream_interval_s,
            "redis.unread_interval_s": unread_interval_s,
            "beat.every_s": 0.1,
            "beat.life_s": life_s,
        }
        config = load_config({}, flags=flags)
        self.clock = Clock()
        self.connections = Connections(url, timeout_s=config.redis.timeout_s)
        mailbox, health = Mailbox(max_buffered_bytes=max_buffered_bytes), RedisHealth(get_log(), url)
        self.context = WorkerContext(
            incarnation="me",
            partitions=partitions,
            config=config,
            origin=Origin(model="m", fingerprint="f", worker="w"),
            cache_tokens=10_000,
            leases=Leases(),
            mailbox=mailbox,
            clock=ServerClock(),
            health=health,
            unavailable=UnavailablePartitions(self.connections.open, health, mailbox.wake),
            meters=Meters(),
            watchdog=Watchdog(30.0, self.clock),
            log=get_log(),
        )
        self.taken: list[HeldJob] = []
        self.listener = NotificationListener(self.connections.open(), mailbox.wake_puller, mailbox.fail)
        uplink = self.connections.uplink
        self.returns = ReturnQueue(uplink.puller, self.context)
        self.pulling = Pulling(uplink, self.listener, self.context, self.returns, self._admit)
        self.exchange = Exchange(uplink.client, self.context, self.pulling)

    def _admit(self, jobs: list[HeldJob]) -> None:
        for job in jobs:
            job.admit()
        self.taken += jobs

    def start(self) -> None:
        """With an engine that has room."""
        self.context.mailbox.new_requests(ROOM, wait_s=0)
        self.listener.start()
        self._beat_for_long()
        self.exchange.start()

    def _beat_for_long(self) -> None:
        """Nothing here renews the heartbeat."""
        heartbeat = calls.Beat(incarnation="me", held=(), processed_pull=0, expiry_ms=600_000)
        with closing(self.connections.open()) as client:
            for keys in self.context.partitions:
                run(client, calls.beat(keys, heartbeat))

    def stop(self) -> None:
        """In the daemon's order."""
        self.exchange.stop()
        self.listener.stop()
        self.connections.stop()


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:  # redis-py types it in part
    with valkey.client() as client:
        yield client


@pytest.fixture
def running(valkey: RedisServer, request: pytest.FixtureRequest) -> Generator[Running]:
    """With what a test asks for by `@pytest.mark.parametrize("running", [{...}], indirect=True)`."""
    running = Running(valkey.url, **getattr(request, "param", {}))
    yield running
    running.stop()


def be_up_for_long(running: Running, queue: Queue) -> None:
    """Make the server old enough to detect dead workers, and give the exchange its clock."""
    queue.configure(test_clock_offset_ms=3_600_000)
    sent_s = monotonic_s()
    running.context.clock.read(queue.look().server_ms, sent_s=sent_s, received_s=monotonic_s())


class TestGivenALoopThatHangs:
    def test_when_jobs_wait_then_none_is_pulled_until_the_step_ends(self, running: Running, client: Any) -> None:
        with running.context.watchdog:
            running.clock.now_s += 31
            (job_id,) = submit_all(client, [Ask()])
            running.start()

            # Its first turn would pull.
            with pytest.raises(AssertionError, match="in vain"):
                wait_until(lambda: running.taken, "it pulls", patience_s=0.3)

        wait_until(lambda: running.taken, "it pulls")
        assert running.taken[0].id == job_id


class TestGivenAJobWithMoreToSayThanATurnTakes:
    """Two hundred entries of it, while another job has not begun."""

    @pytest.fixture
    def jobs(self, running: Running, client: Any) -> list[HeldJob]:
        """One with much to say, and one that has not begun."""
        running.start()
        submit_all(client, [Ask()] * 2)
        wait_until(lambda: len(running.taken) == 2, "both are held")
        running.pulling.quiet()
        return running.taken

    @staticmethod
    def _speak(running: Running, job: HeldJob) -> None:
        token_ids = (1,) * (200 * MAX_ENTRY_TOKENS)
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        delta = TokenDelta(request_id=job.request_id, choice=0, start=0, token_ids=token_ids, text="x", stats=stats)
        running.context.mailbox.publish([delta])
        wait_until(lambda: job.num_published, "it is published")

    def test_when_drained_then_what_has_not_begun_goes_back_at_once(
        self, running: Running, client: Any, jobs: list[HeldJob]
    ) -> None:
        self._speak(running, jobs[0])
        running.returns.add_unstarted()

        wait_until(lambda: state_of(client, jobs[1].id) is JobState.QUEUED, "it goes back")
        assert jobs[0].has_updates


class HeldUp:
    """Stands before the exchange's round trips: those with a call of one kind wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.script = script
        self.may_go = threading.Event()
        self.has_come = threading.Event()
        self.is_lost = False
        """Whether the delayed call is lost instead of answered."""

        self.num_made = 0
        self._run_many = trips.run_many
        monkeypatch.setattr(trips, "run_many", self)

    def __call__(self, client: Any, calls: Sequence[Call[Any]]) -> list[Any]:
        if any(call.script == self.script for call in calls):
            self.num_made += 1
            self.has_come.set()
            assert self.may_go.wait(20)
            if self.is_lost:
                self.is_lost = False
                raise RedisConnectionError("lost on its way")
        return self._run_many(client, calls)


class TestGivenARoundTripUnderWay:
    @staticmethod
    def _delta(job: HeldJob) -> TokenDelta:
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        return TokenDelta(request_id=job.request_id, choice=0, start=0, token_ids=(1,), text="x", stats=stats)

    @staticmethod
    def _pull_under_way(running: Running, client: Any, monkeypatch: pytest.MonkeyPatch) -> HeldUp:
        """One job is held, and a pull that is to bring another has been held up."""
        running.start()
        submit_all(client, [Ask()])
        wait_until(lambda: running.taken, "it is held")
        pull = HeldUp(monkeypatch, "pull")
        submit_all(client, [Ask()])
        assert pull.has_come.wait(20)
        return pull

    def test_when_it_is_a_pull_then_output_of_the_engine_is_published_meanwhile(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pull = self._pull_under_way(running, client, monkeypatch)

        running.context.mailbox.publish([self._delta(running.taken[0])])

        wait_until(lambda: running.taken[0].num_published, "it is published")
        assert len(running.taken) == 1
        pull.may_go.set()
        wait_until(lambda: len(running.taken) == 2, "the pull brings the other")

    def test_when_quieted_during_a_pull_then_its_jobs_are_taken_and_no_more_are_pulled(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pull = self._pull_under_way(running, client, monkeypatch)

        running.pulling.quiet()
        waiting = threading.Thread(target=running.pulling.wait_for_pull, daemon=True)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        pull.may_go.set()
        waiting.join(20)

        assert len(running.taken) == 2
        (later,) = submit_all(client, [Ask()])
        with pytest.raises(AssertionError, match="in vain"):
            wait_until(lambda: len(running.taken) > 2, "another comes", patience_s=0.3)
        assert state_of(client, later) is JobState.QUEUED

    def test_when_it_is_a_word_then_more_jobs_are_pulled_meanwhile(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running.start()
        submit_all(client, [Ask()])
        wait_until(lambda: running.taken, "it is held")
        word = HeldUp(monkeypatch, "advance")
        running.context.mailbox.publish([self._delta(running.taken[0])])
        assert word.has_come.wait(20)

        submit_all(client, [Ask()])

        wait_until(lambda: len(running.taken) == 2, "it pulls")
        word.may_go.set()
        wait_until(lambda: running.taken[0].num_published, "and it is published")

    def test_when_a_pull_brings_the_job_again_then_the_older_request_is_not_published(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running.start()
        submit_all(client, [Ask()])
        wait_until(lambda: running.taken, "it is held")
        older = running.taken[0]
        word = HeldUp(monkeypatch, "advance")
        running.context.mailbox.publish([self._delta(older)])
        assert word.has_come.wait(20)

        newer = running.context.leases.new_job(older.leased, older.keys, older.spec)
        newer.admit()
        running.context.leases.take(KEYS, 1, [newer])
        word.is_lost = True
        word.may_go.set()
        wait_until(lambda: not word.is_lost, "it is lost")
        running.context.mailbox.publish([self._delta(newer)])

        wait_until(lambda: newer.num_published, "the newer one is published")
        assert word.num_made == 2
        assert older.num_published == 0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The exchange's clock."""
    clock = Clock()
    monkeypatch.setattr("sluice.worker.serve.exchange.monotonic_s", clock)
    return clock


@pytest.fixture
def jobs(now: Clock, running: Running, client: Any) -> list[HeldJob]:
    """Two that stream. A round has just published the second token of one job."""
    running.start()
    submit_all(client, [Ask()] * 2)
    wait_until(lambda: len(running.taken) == 2, "both are held")
    for start in range(2):
        say(running, running.taken[0], start)
        wait_until(lambda num=start + 1: running.taken[0].num_published == num, "a first round begins at once")
    return running.taken


def say(running: Running, job: HeldJob, start: int, finish: Finish | None = None) -> None:
    """Let the engine yield one token."""
    stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
    delta = TokenDelta(
        request_id=job.request_id, choice=0, start=start, token_ids=(1,), text="x", stats=stats, finish=finish
    )
    running.context.mailbox.publish([delta])


def num_ended(running: Running) -> dict[str, int]:
    """Jobs that have ended, by state."""
    return {state: count for state, count in running.context.meters.jobs_by_state.items() if count}


class TestGivenJobsThatStream:
    """Two, with a round each second, by a clock that stands until it is moved."""

    @pytest.mark.parametrize("running", [{"stream_interval_s": 1.0}], indirect=True)
    def test_when_both_run_then_first_tokens_and_ends_are_sent_at_once_and_others_later(
        self, now: Clock, running: Running, client: Any, jobs: list[HeldJob]
    ) -> None:
        say(running, jobs[0], 2)
        say(running, jobs[1], 0)
        wait_until(lambda: jobs[1].num_published == 1, "a first token is published")
        say(running, jobs[0], 3)
        say(running, jobs[1], 1, Finish(reason=FinishReason.LENGTH))
        wait_until(lambda: state_of(client, jobs[1].id) is JobState.DONE, "an end is published")
        assert jobs[0].num_published == 2

        now.now_s += 1.0

        wait_until(lambda: jobs[0].num_published == 4, "the round begins")
        entries = read_channel(client, jobs[0].id)
        assert [(one.start, len(one.token_ids)) for one in entries] == [(0, 1), (1, 1), (2, 2)]

    @pytest.mark.parametrize("running", [{"stream_interval_s": 1.0}], indirect=True)
    def test_when_the_worker_stops_before_the_next_round_then_all_is_published(
        self, running: Running, jobs: list[HeldJob]
    ) -> None:
        say(running, jobs[0], 2)

        running.exchange.stop()

        assert jobs[0].num_published == 3

    @pytest.mark.parametrize("running", [{"stream_interval_s": 0.0}], indirect=True)
    def test_when_there_are_no_rounds_then_each_token_travels_at_once(
        self, running: Running, client: Any, jobs: list[HeldJob]
    ) -> None:
        for start in range(2, 6):
            say(running, jobs[0], start)
            wait_until(lambda num=start + 1: jobs[0].num_published == num, "it is published")

        assert [len(one.token_ids) for one in read_channel(client, jobs[0].id)] == [1] * 6


def has_waiting_reader(client: Any) -> bool:  # redis-py types it in part
    """Return whether a client waits in XREAD."""
    return any(one["cmd"] == "xread" and "b" in one["flags"] for one in client.client_list())


class TestGivenJobsThatNobodyReads:
    """Two that stream, and the server has answered no reader for longer than readers count as there."""

    @pytest.fixture(autouse=True)
    def quiet(self, now: Clock, jobs: list[HeldJob]) -> None:
        now.now_s += 1.1 * KEPT_S

    @staticmethod
    def _say_and_send(running: Running, jobs: list[HeldJob], starts: tuple[int, int]) -> None:
        """Let both say a token, and wait until the second job's, which is urgent, has been sent."""
        for job, start in zip(jobs, starts, strict=True):
            say(running, job, start)
        wait_until(lambda: jobs[1].num_published == starts[1] + 1, "what is urgent is published")

    @pytest.mark.parametrize("running", [{"unread_interval_s": 0.5}], indirect=True)
    def test_when_they_go_on_then_rounds_are_longer_and_first_tokens_are_not_late(
        self, now: Clock, running: Running, client: Any, jobs: list[HeldJob]
    ) -> None:
        say(running, jobs[0], 2)
        wait_until(lambda: jobs[0].num_published == 3, "a round that was due begins")

        now.now_s += 0.2
        self._say_and_send(running, jobs, (3, 0))
        assert jobs[0].num_published == 3

        now.now_s += 0.3
        wait_until(lambda: jobs[0].num_published == 4, "the round begins")

    @pytest.mark.parametrize("running", [{"unread_interval_s": 0.5}], indirect=True)
    def test_when_something_urgent_is_sent_then_a_round_that_is_half_due_goes_with_it(
        self, now: Clock, running: Running, jobs: list[HeldJob]
    ) -> None:
        say(running, jobs[0], 2)
        wait_until(lambda: jobs[0].num_published == 3, "a round that was due begins")

        now.now_s += 0.3
        self._say_and_send(running, jobs, (3, 0))

        wait_until(lambda: jobs[0].num_published == 4, "the round has gone with it")

    @pytest.mark.parametrize("running", [{"unread_interval_s": 0.5}], indirect=True)
    def test_when_a_reader_comes_then_it_has_long_rounds_once_at_most(
        self, now: Clock, running: Running, client: Any, jobs: list[HeldJob]
    ) -> None:
        say(running, jobs[0], 2)
        wait_until(lambda: jobs[0].num_published == 3, "a round that was due begins")
        client.xread({KEYS.channel(jobs[0].id): "0"})
        now.now_s += 0.5
        say(running, jobs[0], 3)
        wait_until(lambda: jobs[0].num_published == 4, "the round that counts the read begins")

        now.now_s += 0.02
        say(running, jobs[0], 4)

        wait_until(lambda: jobs[0].num_published == 5, "the next one is soon")

    @pytest.mark.parametrize("running", [{"unread_interval_s": 0.5}], indirect=True)
    def test_when_a_reader_waits_for_a_first_token_then_rounds_are_short_from_there(
        self, now: Clock, running: Running, valkey: RedisServer, jobs: list[HeldJob]
    ) -> None:
        with valkey.client() as other:
            reader = threading.Thread(target=other.xread, args=({KEYS.channel(jobs[1].id): "0"}, None, 20_000))
            reader.start()
            with valkey.client() as client:
                wait_until(lambda: has_waiting_reader(client), "it waits")
            say(running, jobs[1], 0)
            reader.join(20)
            wait_until(lambda: jobs[1].num_published == 1, "its first token is there")

            now.now_s += 0.02
            say(running, jobs[1], 1)

            wait_until(lambda: jobs[1].num_published == 2, "and the next one soon")


class TestGivenTwoPartitions:
    OTHER = QueueKeys(KEYS.queue, 1)

    @pytest.mark.parametrize("running", [{"partitions": (KEYS, OTHER)}], indirect=True)
    @pytest.mark.parametrize("error", [ResponseError("unexpected"), ValueError("unreadable")], ids=repr)
    def test_when_one_breaks_the_worker_then_the_end_on_the_other_counts(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        """The worker breaks, after it has applied every reply."""
        running.start()
        submit_all(client, [Ask()], keys=self.OTHER)
        wait_until(lambda: running.taken, "the first is held")
        submit_all(client, [Ask()])
        wait_until(lambda: len(running.taken) == 2, "both are held")
        self._break_advances(monkeypatch, error)
        stats, finish = SequenceStats(num_prompt_tokens=PROMPT_TOKENS), Finish(reason=FinishReason.STOP)
        running.context.mailbox.publish(
            [
                TokenDelta(
                    request_id=job.request_id, choice=0, start=0, token_ids=(1,), text="x", stats=stats, finish=finish
                )
                for job in running.taken
            ]
        )

        with pytest.raises(WorkerBroken):
            wait_until(lambda: running.context.mailbox.new_requests(ROOM, wait_s=1), "the worker breaks")

        assert num_ended(running) == {"done": 1}
        assert [job.keys for job in running.context.leases.all()] == [self.OTHER]

    def _break_advances(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        """Replace the replies to advances on the other partition with the error that breaks the worker."""
        run_many = trips.run_many

        def answer(client: Any, calls: Sequence[Call[Any]]) -> list[Any]:
            is_broken = [call.script == "advance" and call.keys == self.OTHER.fixed() for call in calls]
            replies = run_many(client, calls)
            return [error if broken else reply for broken, reply in zip(is_broken, replies, strict=True)]

        monkeypatch.setattr(availability, "MAX_UNEXPECTED_REPLIES", 1)
        monkeypatch.setattr(trips, "run_many", answer)


class TestGivenAJobWithChoices:
    def test_when_one_fails_before_the_last_is_done_then_a_failed_job_is_counted(
        self, running: Running, client: Any
    ) -> None:
        running.start()
        submit_all(client, [Ask(options=JobOptions(n=2))])
        wait_until(lambda: running.taken, "it is held")
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        final = FailureKind.LOGITS  # no other try would help
        finishes = (
            Finish(reason=FinishReason.ERROR, error="it broke", failure=final),
            Finish(reason=FinishReason.STOP),
        )
        running.context.mailbox.publish(
            [
                TokenDelta(
                    request_id=running.taken[0].request_id, choice=choice, start=0, token_ids=(), text="", stats=stats,
                    finish=finish,
                )
                for choice, finish in enumerate(finishes)
            ]
        )  # fmt: skip

        wait_until(lambda: not len(running.context.leases), "it has ended")

        wait_until(lambda: num_ended(running), "it is counted")
        assert num_ended(running) == {"failed": 1}
        assert state_of(client, running.taken[0].id) is JobState.FAILED

    def test_when_one_fails_and_the_job_is_retried_then_the_engine_drops_the_other(
        self, running: Running, client: Any
    ) -> None:
        running.start()
        submit_all(client, [Ask(options=JobOptions(n=2))])
        wait_until(lambda: running.taken, "it is held")
        request_id = running.taken[0].request_id
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        finish = Finish(reason=FinishReason.ERROR, error="it broke", failure=FailureKind.STEP)
        running.context.mailbox.publish(
            [TokenDelta(request_id=request_id, choice=0, start=0, token_ids=(), text="", stats=stats, finish=finish)]
        )

        wait_until(lambda: not len(running.context.leases), "it goes back")

        assert running.context.mailbox.lost() == [request_id]

    def test_when_its_result_is_larger_than_can_be_kept_then_it_fails_and_says_so(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "MAX_RESULT_BYTES", 500)
        running.start()
        submit_all(client, [Ask()])
        wait_until(lambda: running.taken, "it is held")
        job, stats = running.taken[0], SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        running.context.mailbox.publish(
            [
                TokenDelta(
                    request_id=job.request_id, choice=0, start=0, token_ids=(1,), text="x" * 1000, stats=stats,
                    finish=Finish(reason=FinishReason.STOP),
                )
            ]
        )  # fmt: skip

        wait_until(lambda: num_ended(running), "it is counted")

        assert num_ended(running) == {"failed": 1}
        view = Queue(client, KEYS).view(job.id)
        assert (view.state, view.error_code, view.has_result) == (JobState.FAILED, "result_too_large", False)
        assert view.error is not None
        end = read_channel(client, job.id)[-1].end
        assert end is not None
        assert (end.state, end.error) == (view.state, view.error)


class TestGivenAJobWhoseOutputCannotBeEncoded:
    """Of two jobs, one gets text that is not UTF-8, in the first of its two choices."""

    def test_when_its_tokens_come_then_it_ends_failed_and_the_other_goes_on(
        self, running: Running, client: Any
    ) -> None:
        running.start()
        submit_all(client, [Ask(options=JobOptions(n=2)), Ask()])
        wait_until(lambda: len(running.taken) == 2, "both are held")
        bad, good = sorted(running.taken, key=lambda job: -job.leased.choices)
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        delta = TokenDelta(request_id=bad.request_id, choice=1, start=0, token_ids=(1,), text="x", stats=stats)
        running.context.mailbox.publish([delta])
        wait_until(lambda: bad.num_published == 1, "a token of it is published")

        with capture_logs() as lines:
            running.context.mailbox.publish([delta._replace(choice=0, text="\ud800" + "x" * 9000)])
            wait_until(lambda: len(lines) == 2, "both lines are there")
        say(running, good, 0, Finish(reason=FinishReason.LENGTH))
        wait_until(lambda: not len(running.context.leases), "the other has ended")

        view = Queue(client, KEYS).view(bad.id)
        assert (view.state, view.error_code) == (JobState.FAILED, "output_not_encoded")
        ends = [read_channel(client, bad.id, choice)[-1].end for choice in range(2)]
        assert [end.error for end in ends if end] == [view.error] * 2
        assert "utf-8" in (view.error or "")
        assert len(view.error or "") <= 500
        assert state_of(client, good.id) is JobState.DONE
        assert running.context.mailbox.lost() == [bad.request_id]
        assert [line["event"] for line in lines] == ["output not encoded", "job ended"]
        assert (lines[1]["error_code"], lines[1]["error"]) == (view.error_code, view.error)


class TestGivenADeadWorker:
    @pytest.fixture(autouse=True)
    def dead(self, running: Running, client: Any) -> None:
        """Its lifetime expired while it held a job, on a server that is up for long."""
        queue = Queue(client, KEYS)
        be_up_for_long(running, queue)
        other = queue.worker("other")
        queue.add("a")
        other.beat(other.take().id, expiry_ms=1)
        # No worker beats in these tests: the lifetime expires by the server's clock.
        client.delete(KEYS.key("clock"))

    @pytest.mark.parametrize("running", [{"life_s": 600.0}], indirect=True)
    def test_when_another_starts_and_reaches_redis_at_once_then_it_reclaims_at_once(self, running: Running) -> None:
        running.start()

        wait_until(lambda: running.taken, "it reclaims")

    def test_when_another_had_to_wait_for_redis_then_it_reclaims_nothing_for_a_life(
        self, running: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sluice.worker.connection.clients.AT_ONCE_S", -1.0)
        started_s = monotonic_s()
        running.start()

        wait_until(lambda: running.taken, "it reclaims")

        assert monotonic_s() - started_s > 0.4


class TestGivenARedisThatStandsStill:
    @pytest.mark.parametrize("running", [{"life_s": 1.2}], indirect=True)
    def test_when_it_stood_for_longer_than_a_beat_then_nothing_is_reclaimed_for_a_life(
        self, running: Running, client: Any
    ) -> None:
        """A worker that seems dead then may have been unable to send a heartbeat."""
        queue = Queue(client, KEYS)
        be_up_for_long(running, queue)
        running.start()
        wait_until(lambda: running.context.meters.num_round_trips, "it has pulled")
        running.pulling.quiet()
        running.pulling.wait_for_pull()
        other = queue.worker("other")
        other.beat(expiry_ms=250)
        client.delete(KEYS.key("clock"))  # no worker beats: the lifetime expires by the server's clock
        queue.add("a")
        other.take()

        stood_s = monotonic_s() + 1.0
        client.execute_command("CLIENT", "PAUSE", 1000, "ALL")
        running.pulling.resume()
        wait_until(lambda: running.context.health.stalled_s > 0, "it notices that its answer was late")
        # It rings: else the next pull would come too late to see anything.
        queue.add("b")

        wait_until(lambda: [job for job in running.taken if job.id.endswith(".b")], "it pulls")
        assert len(running.taken) == 1 or monotonic_s() - stood_s > 1.2
        wait_until(lambda: len(running.taken) == 2, "it reclaims")
        assert monotonic_s() - stood_s > 1.2


class TestGivenABufferAtItsBoundWithWordsOfAJobThatIsLost:
    def test_when_no_other_has_output_then_the_loop_continues(self, valkey: RedisServer, client: Any) -> None:
        running = Running(valkey.url, max_buffered_bytes=1)
        running.start()
        submit_all(client, [Ask()])
        wait_until(lambda: running.taken, "it is held")
        running.pulling.quiet()
        (job,) = running.taken
        running.context.lose(job, "replaced")
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        delta = TokenDelta(request_id=job.request_id, choice=0, start=0, token_ids=(1,), text="x", stats=stats)

        loop = threading.Thread(target=running.context.mailbox.publish, args=([delta],), daemon=True)
        loop.start()
        loop.join(5)

        assert not loop.is_alive()
        running.stop()
