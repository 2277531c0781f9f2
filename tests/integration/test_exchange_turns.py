"""What the exchange does in its turns, whatever else keeps it busy: on a real server, with a loop that tests move."""

import threading
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from engine.request import FailureKind, Finish, FinishReason, Room, SequenceStats, TokenDelta
from producer.contract import limits
from producer.contract.calls import Call
from producer.contract.states import JobState
from producer.contract.wire import JobOptions
from tests.contract.driving import Queue
from tests.integration.jobs import KEYS, Ask, read_channel, state_of, submit_all, wait_until
from tests.servers import RedisServer
from worker import trips
from worker.absences import Absences
from worker.bell import Bell
from worker.channel import MAX_ENTRY_TOKENS
from worker.clock import ServerClock, monotonic_s
from worker.common import Common
from worker.config import load_config
from worker.connections import Connections
from worker.exchange import Exchange
from worker.health import RedisHealth
from worker.leases import HeldJob, Leases
from worker.life import StepWatch
from worker.log import get_log
from worker.mailbox import Mailbox
from worker.metrics import Meters
from worker.results import Origin

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
        self, url: str, *, max_buffered_bytes: int = 2**30, life_s: float = 0.4, stream_interval_s: float = 0.02
    ) -> None:
        flags = {
            "redis.url": url,
            "redis.stream_interval_s": stream_interval_s,
            "queue.model_wait_s": 0.01,
            "beat.every_s": 0.1,
            "beat.life_s": life_s,
        }
        config = load_config({}, flags=flags)
        self.clock = Clock()
        self.watch = StepWatch(30.0, self.clock)
        self.connections = Connections(url, timeout_s=config.redis.timeout_s)
        mailbox, health = Mailbox(max_buffered_bytes=max_buffered_bytes), RedisHealth(get_log(), url)
        self.common = Common(
            incarnation="me",
            partitions=(KEYS,),
            config=config,
            origin=Origin(model="m", fingerprint="f", worker="w"),
            leases=Leases(),
            mailbox=mailbox,
            clock=ServerClock(),
            health=health,
            absences=Absences(self.connections.open, health, mailbox.ring),
            meters=Meters(),
            log=get_log(),
        )
        self.taken: list[HeldJob] = []
        self.bell = Bell(self.connections.open(), mailbox.ring, mailbox.fail)
        self.exchange = Exchange(self.connections, self.bell, self.common, self.watch)
        self.exchange.connect(self.taken.extend, cache_tokens=10_000)

    def start(self) -> None:
        """With an engine that has room."""
        self.common.mailbox.take_requests(ROOM, wait_s=0)
        self.bell.start()
        self.exchange.start()

    def stop(self) -> None:
        """In the daemon's order."""
        self.exchange.stop()
        self.bell.stop()
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
    """Let the server be one that can tell who is dead, and the exchange know its clock."""
    queue.configure(test_clock_offset_ms=3_600_000)
    sent_s = monotonic_s()
    running.common.clock.read(queue.look().server_ms, sent_s=sent_s, received_s=monotonic_s())


class TestGivenALoopThatHangs:
    def test_when_jobs_wait_then_none_is_pulled_until_the_step_ends(self, running: Running, client: Any) -> None:
        running.watch.begin()
        running.clock.now_s += 31
        (job_id,) = submit_all(client, [Ask()])
        running.start()

        # Its first turn would pull.
        with pytest.raises(AssertionError, match="in vain"):
            wait_until(lambda: running.taken, "it pulls", patience_s=0.3)

        running.watch.end()
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
        running.exchange.quiet()
        return running.taken

    @staticmethod
    def _speak(running: Running, job: HeldJob) -> None:
        token_ids = (1,) * (200 * MAX_ENTRY_TOKENS)
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        delta = TokenDelta(request_id=job.request_id, choice=0, start=0, token_ids=token_ids, text="x", stats=stats)
        running.common.mailbox.put_deltas([delta])
        wait_until(lambda: job.num_published, "it is heard")

    def test_when_drained_then_what_has_not_begun_goes_back_at_once(
        self, running: Running, client: Any, jobs: list[HeldJob]
    ) -> None:
        self._speak(running, jobs[0])
        running.exchange.return_unstarted()

        wait_until(lambda: state_of(client, jobs[1].id) is JobState.QUEUED, "it goes back")
        assert jobs[0].has_news

    def test_when_another_waited_for_its_model_long_enough_then_it_goes_back_at_once(
        self, running: Running, client: Any, jobs: list[HeldJob]
    ) -> None:
        self._speak(running, jobs[0])
        running.exchange.wait_for_model(jobs[1])

        wait_until(lambda: state_of(client, jobs[1].id) is JobState.QUEUED, "it goes back")
        assert jobs[0].has_news


class HeldUp:
    """Stands before the exchange's round trips: those with a call of one kind wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.script = script
        self.may_go = threading.Event()
        self.has_come = threading.Event()
        self.is_lost = False
        """Whether what was held up is lost, instead of answered."""

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

    def test_when_it_is_a_pull_then_what_the_engine_says_is_told_meanwhile(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pull = self._pull_under_way(running, client, monkeypatch)

        running.common.mailbox.put_deltas([self._delta(running.taken[0])])

        wait_until(lambda: running.taken[0].num_published, "it is told")
        assert len(running.taken) == 1
        pull.may_go.set()
        wait_until(lambda: len(running.taken) == 2, "the pull brings the other")

    def test_when_it_is_a_pull_and_it_is_quieted_then_what_it_brings_is_waited_for_and_no_more_comes(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pull = self._pull_under_way(running, client, monkeypatch)

        running.exchange.quiet()
        waiting = threading.Thread(target=running.exchange.wait_for_pull, daemon=True)
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
        running.common.mailbox.put_deltas([self._delta(running.taken[0])])
        assert word.has_come.wait(20)

        submit_all(client, [Ask()])

        wait_until(lambda: len(running.taken) == 2, "it pulls")
        word.may_go.set()
        wait_until(lambda: running.taken[0].num_published, "and it is told")

    def test_when_a_pull_brings_the_job_again_then_the_older_request_is_not_heard_of_any_more(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running.start()
        submit_all(client, [Ask()])
        wait_until(lambda: running.taken, "it is held")
        older = running.taken[0]
        word = HeldUp(monkeypatch, "advance")
        running.common.mailbox.put_deltas([self._delta(older)])
        assert word.has_come.wait(20)

        newer = HeldJob(leased=older.leased, keys=older.keys, spec=older.spec)
        running.common.leases.take(KEYS, 1, [newer])
        word.is_lost = True
        word.may_go.set()
        wait_until(lambda: not word.is_lost, "it is lost")
        running.common.mailbox.put_deltas([self._delta(newer)])

        wait_until(lambda: newer.num_published, "the newer one is told")
        assert word.num_made == 2
        assert older.num_published == 0


class TestGivenJobsThatStream:
    """Two, with a round each second, by a clock that stands until it is moved."""

    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        monkeypatch.setattr("worker.exchange.monotonic_s", clock)
        return clock

    @pytest.fixture
    def jobs(self, now: Clock, running: Running, client: Any) -> list[HeldJob]:
        """Of one, a round has just told the second token."""
        running.start()
        submit_all(client, [Ask()] * 2)
        wait_until(lambda: len(running.taken) == 2, "both are held")
        for start in range(2):
            self._say(running, running.taken[0], start)
            wait_until(lambda told=start + 1: running.taken[0].num_published == told, "a first round begins at once")
        return running.taken

    @staticmethod
    def _say(running: Running, job: HeldJob, start: int, finish: Finish | None = None) -> None:
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        delta = TokenDelta(
            request_id=job.request_id, choice=0, start=start, token_ids=(1,), text="x", stats=stats, finish=finish
        )
        running.common.mailbox.put_deltas([delta])

    @pytest.mark.parametrize("running", [{"stream_interval_s": 1.0}], indirect=True)
    def test_when_both_go_on_then_a_first_token_and_an_end_travel_at_once_and_the_others_with_the_next_round(
        self, now: Clock, running: Running, client: Any, jobs: list[HeldJob]
    ) -> None:
        self._say(running, jobs[0], 2)
        self._say(running, jobs[1], 0)
        wait_until(lambda: jobs[1].num_published == 1, "a first token is told")
        self._say(running, jobs[0], 3)
        self._say(running, jobs[1], 1, Finish(reason=FinishReason.LENGTH))
        wait_until(lambda: state_of(client, jobs[1].id) is JobState.DONE, "an end is told")
        assert jobs[0].num_published == 2

        now.now_s += 1.0

        wait_until(lambda: jobs[0].num_published == 4, "the round begins")
        entries = read_channel(client, jobs[0].id)
        assert [(one.start, len(one.token_ids)) for one in entries] == [(0, 1), (1, 1), (2, 2)]

    @pytest.mark.parametrize("running", [{"stream_interval_s": 1.0}], indirect=True)
    def test_when_the_worker_stops_before_the_next_round_then_all_is_told(
        self, running: Running, jobs: list[HeldJob]
    ) -> None:
        self._say(running, jobs[0], 2)

        running.exchange.stop()

        assert jobs[0].num_published == 3

    @pytest.mark.parametrize("running", [{"stream_interval_s": 0.0}], indirect=True)
    def test_when_there_are_no_rounds_then_each_token_travels_at_once(
        self, running: Running, client: Any, jobs: list[HeldJob]
    ) -> None:
        for start in range(2, 6):
            self._say(running, jobs[0], start)
            wait_until(lambda told=start + 1: jobs[0].num_published == told, "it is told")

        assert [len(one.token_ids) for one in read_channel(client, jobs[0].id)] == [1] * 6


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
        running.common.mailbox.put_deltas(
            [
                TokenDelta(
                    request_id=running.taken[0].request_id, choice=choice, start=0, token_ids=(), text="", stats=stats,
                    finish=finish,
                )
                for choice, finish in enumerate(finishes)
            ]
        )  # fmt: skip

        wait_until(lambda: running.exchange.is_drained, "it has ended")

        wait_until(lambda: running.common.meters.jobs_by_state, "it is counted")
        assert running.common.meters.jobs_by_state == {"failed": 1}
        assert state_of(client, running.taken[0].id) is JobState.FAILED

    def test_when_one_fails_and_the_job_is_tried_again_then_the_engine_is_told_to_drop_the_other(
        self, running: Running, client: Any
    ) -> None:
        running.start()
        submit_all(client, [Ask(options=JobOptions(n=2))])
        wait_until(lambda: running.taken, "it is held")
        request_id = running.taken[0].request_id
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        finish = Finish(reason=FinishReason.ERROR, error="it broke", failure=FailureKind.STEP)
        running.common.mailbox.put_deltas(
            [TokenDelta(request_id=request_id, choice=0, start=0, token_ids=(), text="", stats=stats, finish=finish)]
        )

        wait_until(lambda: running.exchange.is_drained, "it goes back")

        assert running.common.mailbox.take_lost() == [request_id]

    def test_when_its_result_is_larger_than_can_be_kept_then_it_fails_and_says_so(
        self, running: Running, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "MAX_RESULT_BYTES", 500)
        running.start()
        submit_all(client, [Ask()])
        wait_until(lambda: running.taken, "it is held")
        job, stats = running.taken[0], SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        running.common.mailbox.put_deltas(
            [
                TokenDelta(
                    request_id=job.request_id, choice=0, start=0, token_ids=(1,), text="x" * 1000, stats=stats,
                    finish=Finish(reason=FinishReason.STOP),
                )
            ]
        )  # fmt: skip

        wait_until(lambda: running.common.meters.jobs_by_state, "it is counted")

        assert running.common.meters.jobs_by_state == {"failed": 1}
        view = Queue(client, KEYS).view(job.id)
        assert (view.state, view.error_code, view.has_result) == (JobState.FAILED, "result_too_large", False)
        assert view.error is not None
        end = read_channel(client, job.id)[-1].end
        assert end is not None
        assert (end.state, end.error) == (view.state, view.error)


class TestGivenADeadWorker:
    @pytest.fixture(autouse=True)
    def dead(self, running: Running, client: Any) -> None:
        """Its life has run out while it held a job, on a server that is up for long."""
        queue = Queue(client, KEYS)
        be_up_for_long(running, queue)
        other = queue.worker("other")
        queue.add("a")
        other.beat(other.take().id, life_ms=1)

    @pytest.mark.parametrize("running", [{"life_s": 600.0}], indirect=True)
    def test_when_another_starts_and_reaches_redis_at_once_then_it_waits_for_no_life_of_its_own(
        self, running: Running
    ) -> None:
        running.start()

        wait_until(lambda: running.taken, "it reclaims")

    def test_when_another_had_to_wait_for_redis_then_it_reclaims_nothing_for_a_life(
        self, running: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("worker.connections.AT_ONCE_S", -1.0)
        started_s = monotonic_s()
        running.start()

        wait_until(lambda: running.taken, "it reclaims")

        assert monotonic_s() - started_s > 0.4


class TestGivenARedisThatStandsStill:
    def test_when_it_stood_for_longer_than_a_beat_then_nothing_is_reclaimed_for_a_life(
        self, running: Running, client: Any
    ) -> None:
        """Whoever seems dead then may have had no chance to beat."""
        queue = Queue(client, KEYS)
        be_up_for_long(running, queue)
        running.start()
        wait_until(lambda: running.common.meters.num_round_trips, "it has pulled")
        running.exchange.quiet()
        other = queue.worker("other")
        other.beat(life_ms=250)
        queue.add("a")
        other.take()

        stood_s = monotonic_s() + 0.3
        client.execute_command("CLIENT", "PAUSE", 300, "ALL")
        running.exchange.resume()
        wait_until(lambda: running.common.health.stalled_s > 0, "it notices that its answer was late")
        # It rings: else the next pull would come too late to see anything.
        queue.add("b")

        wait_until(lambda: [job for job in running.taken if job.id.endswith(".b")], "it pulls")
        assert len(running.taken) == 1 or monotonic_s() - stood_s > 0.4
        wait_until(lambda: len(running.taken) == 2, "it reclaims")
        assert monotonic_s() - stood_s > 0.4


class TestGivenABufferAtItsBoundWithWordsOfAJobThatIsLost:
    def test_when_nobody_else_has_news_then_the_loop_goes_on(self, valkey: RedisServer, client: Any) -> None:
        running = Running(valkey.url, max_buffered_bytes=1)
        running.start()
        submit_all(client, [Ask()])
        wait_until(lambda: running.taken, "it is held")
        running.exchange.quiet()
        (job,) = running.taken
        running.exchange.drop(job)
        stats = SequenceStats(num_prompt_tokens=PROMPT_TOKENS)
        delta = TokenDelta(request_id=job.request_id, choice=0, start=0, token_ids=(1,), text="x", stats=stats)

        loop = threading.Thread(target=running.common.mailbox.put_deltas, args=([delta],), daemon=True)
        loop.start()
        loop.join(5)

        assert not loop.is_alive()
        running.stop()
