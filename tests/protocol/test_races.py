"""Races, driven through every order in which their steps can happen. Scripts are atomic, so an order is all there is.

Each step is made twice in a row: a reply may be lost, and then the same is sent again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sluice.protocol import calls, limits
from sluice.protocol.calls import Accepted, AdvanceAnswer, Already, Conflict, Duplicate, LeasedJob, Ok, Replaced
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, Worker, check, ending, new_job, short, tokens
from tests.servers import RedisServer, redis_server

Step = Callable[[], object]


def orders(*parties: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every way to mix the steps of the parties that keeps each one's own order."""
    left = [party for party in parties if party]
    if not left:
        yield ()
    for i, party in enumerate(left):
        rest = [other[1:] if j == i else other for j, other in enumerate(left)]
        for order in orders(*rest):
            yield (party[0], *order)


@pytest.fixture
def queues(valkey: RedisServer) -> Iterator[Iterator[Queue]]:
    """One fresh queue after another."""

    def made(client: Any) -> Iterator[Queue]:  # Any: redis-py's clients share no typed base
        while True:
            client.flushall()
            queue = Queue(client)
            queue.stop_clock()
            yield queue

    with valkey.client() as client:
        yield made(client)


def ends(queue: Queue, job_id: JobId) -> list[str]:
    """What ended events say of a job."""
    return [str(event.fields["state"], "ascii") for event in queue.events(job_id) if event.kind == "ended"]  # pyright: ignore[reportArgumentType]


class Holder:
    """A worker that takes the job when it can, says two tokens, and ends it as the queue asks. Changes."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.job: LeasedJob | None = None
        self.asked: JobState | None = None
        self.answers: list[AdvanceAnswer] = []

    def take(self) -> None:
        """Pull, and once more under the same number."""
        first = self.worker.pull().jobs
        again = self.worker.pull(number=self.worker.number).jobs
        assert short(first) == short(again)
        if first:
            (self.job,) = first

    def say(self) -> None:
        """Two tokens more, wherever the job stands."""
        if self.job is None:
            return
        progress = tokens(self.job, self._at, 2)
        self._hear(progress)
        if not isinstance(self.answers[-1], Replaced):
            self.job = self.job._replace(published=(self._at + 2,))

    def end(self) -> None:
        """Done, or as it was asked."""
        if self.job is not None:
            self._hear(ending(self.job, self._at, 1, state=self.asked or JobState.DONE))

    def beat(self) -> None:
        """Receive what is asked of the job, or that it is lost."""
        if self.job is None:
            return
        self.worker.beat(self.job.id)
        reply = self.worker.beat(self.job.id)
        self.asked = dict(reply.stops).get(self.job.id, self.asked)
        if reply.lost:
            self.job = None

    def _hear(self, progress: calls.Progress) -> None:
        (answer,) = self.worker.advance(progress)
        self.answers.append(answer)
        if isinstance(answer, (Ok, Already)) and answer.stop is not None:
            self.asked = answer.stop
        (again,) = self.worker.advance(progress)
        assert isinstance(again, Already) or type(again) is type(answer), (answer, again)

    @property
    def _at(self) -> int:
        assert self.job is not None
        return self.job.published[0]


def cancel_twice(queue: Queue, job_id: JobId) -> str:
    """The first answer; the second must not say less."""
    (first,), (second,) = queue.cancel(job_id), queue.cancel(job_id)
    assert first == second
    return first


class TestGivenACancelAndAnEnd:
    def test_when_they_come_in_any_order_then_the_first_end_stands_and_is_the_only_one(
        self, queues: Iterator[Queue]
    ) -> None:
        seen: set[tuple[str, JobState]] = set()
        for order in orders(("take", "say", "end"), ("cancel",)):
            queue = next(queues)
            job_id, holder, states = queue.add("a"), Holder(queue.worker("A")), list[str]()
            steps: dict[str, Step] = {
                "take": holder.take,
                "say": holder.say,
                "end": holder.end,
                "cancel": lambda queue=queue, job_id=job_id, states=states: states.append(cancel_twice(queue, job_id)),
            }
            for name in order:
                steps[name]()
            seen.add((states[0], queue.state(job_id)))
            assert ends(queue, job_id) == [queue.state(job_id)]
            check(queue)

        assert seen == {
            ("cancelled", JobState.CANCELLED),
            ("asked", JobState.CANCELLED),
            ("done", JobState.DONE),
        } | {("asked", JobState.DONE)}, "asked, and its end was under way already"


class TestGivenACancelOfAJobThatIsBeingTakenOver:
    """A takes the job and dies, or only seems dead; B takes it over; somebody cancels it. A may come back."""

    def test_when_they_come_in_any_order_then_it_ends_once_and_every_token_is_there_once(
        self, queues: Iterator[Queue]
    ) -> None:
        num_orders, outcomes = 0, set[tuple[str, JobState]]()
        for order in orders(("A takes", "A ends"), ("death",), ("B takes", "B says"), ("cancel",)):
            queue = next(queues)
            job_id, states = queue.add("a"), list[str]()
            a, b = Holder(queue.worker("A")), Holder(queue.worker("B"))
            steps: dict[str, Step] = {
                "A takes": a.take,
                "A ends": a.end,
                "death": lambda queue=queue: queue.pass_time(5000),
                "B takes": b.take,
                "B says": b.say,
                "cancel": lambda queue=queue, job_id=job_id, states=states: states.append(cancel_twice(queue, job_id)),
            }
            for name in order:
                steps[name]()
            self.finish(queue, a, b)

            state = queue.state(job_id)
            outcomes.add((states[0], state))
            num_orders += 1
            assert ends(queue, job_id) == [state], order
            assert state is JobState.DONE if states[0] == "done" else state in (JobState.CANCELLED, JobState.DONE), (
                order
            )
            if states[0] == "cancelled":
                assert state is JobState.CANCELLED, order
            check(queue)

        assert num_orders == 180
        assert {("cancelled", JobState.CANCELLED), ("asked", JobState.CANCELLED), ("asked", JobState.DONE)} <= outcomes

    def finish(self, queue: Queue, a: Holder, b: Holder) -> None:
        """Both receive their replies, and a third worker takes what is left."""
        for holder in (a, b):
            holder.beat()
            holder.end()
        queue.pass_time(5000)
        last = Holder(queue.worker("C"))
        last.take()
        last.beat()
        last.end()


class TestGivenExpiryAndAPull:
    @pytest.mark.parametrize("limit", ["ttl_ms", "deadline_ms"])
    @pytest.mark.parametrize("late_ms", [-1, 0, 1])
    @pytest.mark.parametrize("order", list(orders(("fire",), ("pull",))), ids=",".join)
    def test_when_they_come_at_the_same_time_then_the_time_alone_decides(
        self, queue: Queue, limit: str, late_ms: int, order: tuple[str, ...]
    ) -> None:
        due: dict[str, Any] = {limit: 100 if limit == "ttl_ms" else queue.now_ms + 100}
        job_id = queue.add("a", **due)
        queue.pass_time(100 + late_ms)
        worker = queue.worker("A")
        steps: dict[str, Step] = {"fire": queue.fire_timers, "pull": worker.pull}

        for name in order:
            steps[name]()

        assert queue.state(job_id) is (JobState.RUNNING if late_ms < 0 else JobState.EXPIRED)
        check(queue)

    @pytest.mark.parametrize("limit", ["ttl_ms", "deadline_ms"])
    def test_when_more_are_due_than_a_call_fires_then_none_of_them_is_started(self, queue: Queue, limit: str) -> None:
        due: dict[str, Any] = {limit: 100 if limit == "ttl_ms" else queue.now_ms + 100}
        queue.submit(*[new_job(f"late{i:03}", **due) for i in range(150)], new_job("good"))
        queue.pass_time(100)
        worker = queue.worker("A")

        taken: list[str] = []
        for _ in range(10):
            before = queue.look().totals.get("expired", 0)
            taken += short(worker.pull().jobs)
            assert queue.look().totals["expired"] - before <= 2 * limits.SLICE_JOBS

        assert taken == ["good"]
        assert queue.look().totals["expired"] == 150
        assert queue.names("timers") == set()
        check(queue)

    def test_when_it_runs_past_its_deadline_then_an_end_already_sent_stands(self, queues: Iterator[Queue]) -> None:
        seen: set[JobState] = set()
        for order in orders(("say", "end"), ("fire",)):
            queue = next(queues)
            job_id = queue.add("a", deadline_ms=queue.now_ms + 100)
            holder = Holder(queue.worker("A"))
            holder.take()
            queue.pass_time(100)
            steps: dict[str, Step] = {"say": holder.say, "end": holder.end, "fire": queue.fire_timers}
            for name in order:
                steps[name]()
            holder.beat()
            holder.end()
            seen.add(queue.state(job_id))
            assert ends(queue, job_id) == [queue.state(job_id)]
            check(queue)
        assert seen == {JobState.DONE, JobState.EXPIRED}


class TestGivenTheSameJobSubmittedAgain:
    @pytest.mark.parametrize("by", ["id", "key"])
    def test_when_it_comes_anywhere_between_then_there_is_one_job_and_its_state_in_reply(
        self, queues: Iterator[Queue], by: str
    ) -> None:
        first = new_job("a", idempotency_key="k")
        same = first if by == "id" else replace(first, id=JobId("0.t.b"))
        other = replace(same, digest=b"another")
        reached = {0: JobState.QUEUED, 1: JobState.RUNNING, 2: JobState.RUNNING, 3: JobState.DONE}
        for order in orders(("take", "say", "end"), ("again",)):
            queue = next(queues)
            queue.submit(first)
            holder = Holder(queue.worker("A"))
            steps: dict[str, Step] = {"take": holder.take, "say": holder.say, "end": holder.end}
            for name in order:
                if name != "again":
                    steps[name]()
                    continue
                state = reached[order.index("again")]
                for _ in range(2):
                    assert queue.submit(same) == [Duplicate(first.id, state)]
                    assert queue.submit(other) == [Conflict(first.id)]
            assert queue.look().totals["submitted"] == 1
            assert queue.state(first.id) is JobState.DONE
            check(queue)

    def test_when_the_job_is_forgotten_then_its_key_has_the_final_state_until_it_expires(
        self, one_queue: Queue
    ) -> None:
        queue = one_queue
        queue.configure(idempotency_ttl_ms=400, result_ttl_ms=1)
        job = new_job("a", idempotency_key="k")
        again = replace(job, id=JobId("0.t.b"))
        queue.submit(job)
        worker = queue.worker("A")
        leased = worker.take()
        assert queue.client.pttl(queue.keys.key("idem", "t", "k")) == -1, "as long as the job lives"
        worker.advance(ending(leased, 0, 1))
        while queue.client.exists(queue.keys.job(job.id)):
            pass  # it goes by the server's clock

        assert queue.submit(again) == [Duplicate(job.id, JobState.DONE)]
        while queue.client.exists(queue.keys.key("idem", "t", "k")):
            assert queue.client.pttl(queue.keys.key("idem", "t", "k")) <= 400
        (answer,) = queue.submit(again)
        assert isinstance(answer, Accepted)


class TestGivenAnIdempotencyKeyAndARestartOfRedis:
    @pytest.mark.parametrize("is_crash", [False, True])
    def test_when_it_starts_again_from_its_file_then_no_key_has_forgotten(self, *, is_crash: bool) -> None:
        # Every second, a busy disk would postpone the last writes, and a killed server would take them with it.
        with redis_server(is_durable=True, extra=("--appendfsync", "always")) as server:
            client: Any = server.client()
            queue = Queue(client)
            queue.stop_clock()
            names: list[str] = ["waiting", "running", "done", "failed"]
            jobs = {name: new_job(name, idempotency_key=f"key of {name}") for name in names}
            queue.submit(jobs["done"], jobs["failed"])
            worker = queue.worker("A")
            done, failed = worker.pull().jobs
            worker.advance(ending(done, 0, 1), ending(failed, 0, 1, state=JobState.FAILED))
            queue.submit(jobs["running"])
            worker.pull()
            queue.submit(jobs["waiting"])
            kept_ms = {name: client.pttl(queue.keys.key("idem", "t", f"key of {name}")) for name in names}

            server.restart(crash=is_crash)

            expected: dict[str, str] = dict(zip(names, ("queued", "running", "done", "failed"), strict=True))
            for name, job in jobs.items():
                again = replace(job, id=JobId(f"0.t.{name}-again"))
                assert queue.submit(again) == [Duplicate(job.id, JobState(expected[name]))], name
                assert queue.submit(replace(again, digest=b"another")) == [Conflict(job.id)]
                left_ms = client.pttl(queue.keys.key("idem", "t", f"key of {name}"))
                assert left_ms == -1 if kept_ms[name] == -1 else 0 < left_ms <= kept_ms[name]
            assert [kept_ms["waiting"], kept_ms["running"]] == [-1, -1]
            assert queue.look().totals["submitted"] == 4
            check(queue)
            client.close()
