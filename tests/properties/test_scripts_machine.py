"""Any interleaving of script calls agrees with a small model: states, owners, offsets, replies, counters.

The model knows nothing of lanes, timers' order or what fits: where the queue may choose, it only checks that the choice
was allowed. Replies are lost and duplicated, workers die and return, the clock jumps.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.protocol import calls, limits
from sluice.protocol.calls import Accepted, Already, Conflict, Duplicate, LeasedJob, Ok, Replaced, Retried, SendFrom
from sluice.protocol.states import TRANSITIONS, JobState
from sluice.protocol.wire import JobId
from tests.examples import examples
from tests.protocol.driving import Queue, Worker, check, ending, new_job, tokens
from tests.servers import RedisServer, binary_of, how_to_get, redis_server

EXPIRY_MS = 4000
NAMES = [f"j{i}" for i in range(6)]
WORKERS = ["A", "B", "C"]


@dataclass(slots=True, eq=False)
class ModelJob:
    """What a job should be. Changes with every call."""

    digest: bytes
    choices: int
    deadline_ms: int | None = None
    state: JobState = JobState.QUEUED
    owner: str = ""
    epoch: int = 0
    flag: JobState | None = None
    offsets: list[int] = field(default_factory=list[int])
    ended: list[bool] = field(default_factory=list[bool])
    ended_by: tuple[str, int] | None = None
    failures: int = 0
    version: int = 1

    def move(self, state: JobState) -> None:
        """Go to another state, by the one table."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state
        self.version += 1

    def end(self, state: JobState, by: tuple[str, int] | None = None) -> None:
        """Any of the four ends."""
        self.move(state)
        self.owner, self.flag, self.ended_by = "", None, by
        self.ended = [True] * self.choices

    def go_back(self) -> None:
        """Running -> queued."""
        self.move(JobState.QUEUED)
        self.owner, self.flag = "", None


class ScriptsMachine(RuleBasedStateMachine):
    """Producers, three workers and a clock against one real queue."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.queue = Queue(self.stack.enter_context(SERVER[0].client()))
        self.queue.client.flushall()
        self.queue.stop_clock()
        self.jobs: dict[JobId, ModelJob] = {}
        self.workers: dict[str, Worker] = {}
        self.leases: list[tuple[str, LeasedJob]] = []
        self.deregistered: set[str] = set()
        self.last_pull: dict[str, tuple[JobId, ...]] = {}
        self.is_paused = False

    def teardown(self) -> None:
        self.stack.close()

    @initialize(max_failures=st.integers(1, 3), mode=st.sampled_from(["fair", "fifo", "deadline"]))
    def configure(self, max_failures: int, mode: str) -> None:
        self.max_failures = max_failures
        self.queue.configure(max_failures=max_failures, mode=mode)
        self.workers = {name: self.queue.worker(name) for name in WORKERS}

    # ------------------------------------------------------------ producers

    @rule(
        name=st.sampled_from(NAMES),
        is_other=st.integers(0, 5).map(lambda n: n == 0),
        choices=st.sampled_from([1, 1, 2]),
        tenant=st.sampled_from(["t", "u"]),
        wait_ms=st.sampled_from([None, None, 1000]),
        ttl_ms=st.sampled_from([None, None, 3000]),
        deadline_ms=st.sampled_from([None, None, 9000]),
        priority=st.sampled_from([0, 5]),
    )
    def submit(
        self,
        name: str,
        is_other: bool,
        choices: int,
        tenant: str,
        wait_ms: int | None,
        ttl_ms: int | None,
        deadline_ms: int | None,
        priority: int,
    ) -> None:
        digest = b"other" if is_other else name.encode()
        now = self.queue.now_ms
        ends_at_ms = deadline_ms and now + deadline_ms
        job = new_job(
            name,
            tenant,
            digest=digest,
            choices=choices,
            priority=priority,
            ttl_ms=ttl_ms,
            not_before_ms=wait_ms and now + wait_ms,
            deadline_ms=ends_at_ms,
            idempotency_key=f"{tenant}-{name}",
            batch="batch",
        )
        (answer,) = self.queue.submit(job)

        known = self.jobs.get(job.id)
        if known is None:
            assert isinstance(answer, Accepted)
            self.jobs[job.id] = ModelJob(digest, choices, ends_at_ms, offsets=[0] * choices, ended=[False] * choices)
        elif known.digest == digest:
            assert answer == Duplicate(job.id, known.state)
        else:
            assert answer == Conflict(job.id)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        job, dead = self.jobs[job_id], self._dead()
        (answer,) = self.queue.cancel(job_id)

        match job.state:
            case JobState.QUEUED:
                assert answer == "cancelled"
                job.end(JobState.CANCELLED)
            case JobState.RUNNING if job.owner in dead:
                assert answer == (job.flag or JobState.CANCELLED)
                job.end(JobState(answer))
            case JobState.RUNNING:
                assert answer == "asked"
                job.flag = job.flag or JobState.CANCELLED
            case _:
                assert answer == job.state

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        job = self.jobs[job_id]
        well_ended = self.queue.fields(*job_id.split(".")[1:]).get("published", "")
        (answer,) = self.queue.requeue(job_id)

        assert answer is (job.state is JobState.FAILED)
        if answer:
            job.move(JobState.QUEUED)
            job.failures, job.ended_by = 0, None
            job.ended = [one.endswith(":2") for one in well_ended.split(",")]

    @rule()
    def purge(self) -> None:
        waiting = [job for job in self.jobs.values() if job.state is JobState.QUEUED]
        assert self.queue.run(calls.purge(self.queue.keys)) == (len(waiting), False)
        for job in waiting:
            job.end(JobState.CANCELLED)

    # ------------------------------------------------------------ workers

    @rule(
        name=st.sampled_from(WORKERS),
        sequences=st.sampled_from([1, 2, 50]),
        is_empty=st.booleans(),
        over_class=st.sampled_from([None, None, 0, 5]),
    )
    def pull(self, name: str, sequences: int, is_empty: bool, over_class: int | None) -> None:
        worker, dead = self.workers[name], self._dead()
        is_full = over_class is not None
        others = self._registered() - dead - {name}
        reply = worker.pull(sequences=sequences, is_empty=is_empty and not is_full, over_class=over_class)
        for leased in reply.jobs if is_full else ():
            assert leased.priority > (over_class or 0)
            has_waited = reply.server_ms >= leased.submitted_ms + limits.IDLE_FIRST_MS
            assert leased.epoch > 1 or has_waited or not others

        self._after_timers(dead)
        for leased in reply.jobs:
            self._leased(name, leased, dead)
        self._settle_the_dead(dead)
        self.last_pull[name] = tuple(job.id for job in reply.jobs) if reply.jobs else self.last_pull.get(name, ())
        assert not (self.is_paused and reply.jobs)
        assert name not in dead or not reply.jobs

    @precondition(lambda self: any(worker.number for worker in self.workers.values()))
    @rule(name=st.sampled_from(WORKERS))
    def repeat_the_pull(self, name: str) -> None:
        """After a lost reply, the same pull returns the jobs that are still this worker's, and nothing else."""
        worker = self.workers[name]
        stored = self.queue.hash_of("worker", name).get("pull")
        if stored is None or int(stored) != worker.number or self.is_paused:
            return
        dead = self._dead()
        again = worker.pull(number=worker.number).jobs

        self._after_timers(dead)
        self._settle_the_dead(dead)
        mine = [one for one in self.last_pull[name] if self.jobs[one].owner == name]
        assert [job.id for job in again] == mine
        self.leases += [(name, job) for job in again]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), back=st.integers(0, 2), ahead=st.integers(0, 1), num_tokens=st.integers(0, 4))
    def advance(self, data: st.DataObject, back: int, ahead: int, num_tokens: int) -> None:
        name, leased = data.draw(st.sampled_from(self.leases))
        job = self.jobs[leased.id]
        choice = data.draw(st.integers(0, job.choices - 1))
        start = max(0, job.offsets[choice] - back + ahead)
        (answer,) = self.workers[name].advance(tokens(leased, start, num_tokens, choice))

        expected = self._expected(name, leased, choice, start, num_tokens, has_end=False)
        assert answer == expected
        if isinstance(expected, Ok):
            job.offsets[choice] += num_tokens

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        num_tokens=st.integers(0, 3),
        state=st.sampled_from([JobState.DONE, JobState.DONE, JobState.FAILED, JobState.CANCELLED]),
        retry_in_ms=st.sampled_from([None, None, 0, 500]),
        is_doubled=st.booleans(),
    )
    def end(
        self, data: st.DataObject, num_tokens: int, state: JobState, retry_in_ms: int | None, is_doubled: bool
    ) -> None:
        name, leased = data.draw(st.sampled_from(self.leases))
        job = self.jobs[leased.id]
        choice = data.draw(st.integers(0, job.choices - 1))
        start = job.offsets[choice]
        retry = retry_in_ms if state is JobState.FAILED else None
        progress = ending(leased, start, num_tokens, choice, state, retry_in_ms=retry)
        expected = self._expected(name, leased, choice, start, num_tokens, has_end=True)
        is_taken = isinstance(expected, Ok)
        if is_taken and retry is not None and job.flag is None and job.failures + 1 < self.max_failures:
            expected = Retried()

        (answer,) = self.workers[name].advance(progress)

        assert answer == expected
        if is_taken:
            job.offsets[choice] += num_tokens
            self._ended(job, leased, name, choice, state, retry)
        if is_doubled:
            again = self._expected(name, leased, choice, start, num_tokens, has_end=True)
            assert self.workers[name].advance(progress) == [again]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), deregister=st.booleans())
    def give_back(self, data: st.DataObject, deregister: bool) -> None:
        name, leased = data.draw(st.sampled_from(self.leases))
        job = self.jobs[leased.id]
        is_mine = job.state is JobState.RUNNING and (job.owner, job.epoch) == (name, leased.epoch)
        (answer,) = self.workers[name].give_back(leased, deregister=deregister)

        assert answer is is_mine
        if is_mine:
            job.end(job.flag) if job.flag else job.go_back()
        if deregister:
            self.deregistered.add(name)

    @rule(name=st.sampled_from(WORKERS), forgets=st.booleans(), is_late=st.booleans())
    def beat(self, name: str, forgets: bool, is_late: bool) -> None:
        worker = self.workers[name]
        mine = [one for one, job in self.jobs.items() if job.owner == name]
        known = sorted({job.id for owner, job in self.leases if owner == name})
        held = [] if forgets else known
        numbers = {job_id: lease.pull for job_id, (owner, lease) in self.queue.leases().items() if owner == name}
        has_ended = self.queue.hash_of("worker", name).get("reported") == "1"
        processed = worker.number - 1 if is_late else worker.number
        dead = self._dead()
        reply = worker.beat(*held, processed=processed, expiry_ms=EXPIRY_MS)
        if name in self.deregistered:
            assert sorted(reply.lost) == held
        elif has_ended:
            assert list(reply.lost) == held
        if name in self.deregistered or has_ended:
            # The maintenance that follows a heartbeat is another call.
            self._after_timers(dead)
            self._settle_the_dead(dead)
            return
        self._after_beat(name, held, mine, numbers, processed)
        self._after_timers(dead - {name})
        self._settle_the_dead(dead - {name})
        for job_id, flag in reply.stops:
            assert self.jobs[job_id].flag is flag
        assert {one for one in reply.lost if self.jobs[one].owner == name} == set()

    @rule()
    def report_the_death_of_the_last(self) -> None:
        """Of one worker only: it is gone for good, and the others go on."""
        is_registered = self.queue.client.zscore(self.queue.keys.key("alive"), WORKERS[-1]) is not None

        assert self.queue.run(calls.report_death(self.queue.keys, WORKERS[-1])) is is_registered
        assert not is_registered or WORKERS[-1] in self._dead()

    @rule(name=st.sampled_from(WORKERS))
    def lose_a_pull(self, name: str) -> None:
        """It never reached the server: a number is left out."""
        self.workers[name].number += 1

    # ------------------------------------------------------------ time and control

    @rule(ms=st.sampled_from([10, 1000, 5000]))
    def pass_time(self, ms: int) -> None:
        self.queue.pass_time(ms)

    @rule()
    def fire_timers(self) -> None:
        dead = self._dead()
        self.queue.fire_timers()
        self._after_timers(dead)
        self._settle_the_dead(dead)

    @rule()
    def pause_or_resume(self) -> None:
        self.is_paused = not self.is_paused
        self.queue.pause() if self.is_paused else self.queue.resume()

    # ------------------------------------------------------------ what the model says

    def _expected(
        self, name: str, leased: LeasedJob, choice: int, start: int, num_tokens: int, *, has_end: bool
    ) -> calls.AdvanceAnswer:
        job = self.jobs[leased.id]
        if job.state is not JobState.RUNNING:
            return Already() if job.ended_by == (name, leased.epoch) else Replaced()
        if (job.owner, job.epoch) != (name, leased.epoch):
            return Replaced()
        offset = job.offsets[choice]
        if job.ended[choice]:
            return Already(stop=job.flag)
        if start == offset:
            return Ok(stop=job.flag)
        if start + num_tokens <= offset and not has_end:
            return Already(stop=job.flag)
        return SendFrom(offset)

    def _ended(
        self, job: ModelJob, leased: LeasedJob, name: str, choice: int, state: JobState, retry_in_ms: int | None
    ) -> None:
        if retry_in_ms is not None and job.flag is not None:
            return job.end(job.flag, (name, leased.epoch))
        if retry_in_ms is not None:
            job.failures += 1
            if job.failures < self.max_failures:
                return job.go_back()
            return job.end(state, (name, leased.epoch))
        job.ended[choice] = True
        if all(job.ended):
            job.end(state, (name, leased.epoch))
        return None

    def _leased(self, name: str, leased: LeasedJob, dead: set[str]) -> None:
        job = self.jobs[leased.id]
        if job.state is JobState.RUNNING:
            assert job.owner in dead
            assert job.flag is None
            job.go_back()
        job.move(JobState.RUNNING)
        job.owner, job.epoch = name, job.epoch + 1
        assert (leased.epoch, list(leased.published), list(leased.ended)) == (job.epoch, job.offsets, job.ended)
        self.leases.append((name, leased))

    def _settle_the_dead(self, dead: set[str]) -> None:
        """A job of a dead worker may have become a suspect, failed, or ended as it was asked."""
        for job_id, job in self.jobs.items():
            if job.state is JobState.RUNNING and job.owner in dead:
                view = self.queue.view(job_id)
                if view.state is JobState.QUEUED:
                    assert job.flag is None
                    job.go_back()
                elif view.state.is_terminal:
                    assert view.state is (self._flag_now(job) or JobState.FAILED)
                    job.end(view.state)

    def _flag_now(self, job: ModelJob) -> JobState | None:
        """The flag of a running job once due timers have fired: the call that reclaims a job fires them first."""
        is_late = job.deadline_ms is not None and job.deadline_ms <= self.queue.now_ms
        return job.flag or (JobState.EXPIRED if is_late else None)

    def _after_timers(self, dead: set[str]) -> None:
        """Time to live and deadlines may have ended or flagged jobs; flagged ones of dead workers may have ended."""
        for job_id, job in self.jobs.items():
            if job.state is JobState.QUEUED and self.queue.state(job_id) is JobState.EXPIRED:
                job.end(JobState.EXPIRED)
            elif job.state is JobState.RUNNING:
                view, flag = self.queue.view(job_id), self._flag_now(job)
                if flag is not None and view.state is flag:
                    assert job.owner in dead
                    job.end(flag)
                else:
                    job.flag = job.flag or view.asked

    def _after_beat(
        self, name: str, held: list[JobId], mine: list[JobId], numbers: dict[JobId, int], processed: int
    ) -> None:
        for job_id in mine:
            job = self.jobs[job_id]
            if job_id not in held and numbers[job_id] <= processed:
                job.end(job.flag) if job.flag else job.go_back()

    def _registered(self) -> set[str]:
        return {name.decode() for name in self.queue.client.zrange(self.queue.keys.key("alive"), 0, -1)}

    def _dead(self) -> set[str]:
        scores = self.queue.client.zrange(self.queue.keys.key("alive"), 0, -1, withscores=True)
        return {name.decode() for name, expiry in scores if expiry <= self.queue.now_ms}

    # ------------------------------------------------------------ what must hold after every call

    @invariant()
    def the_queue_is_what_the_model_says(self) -> None:
        views = self.queue.views(sorted(self.jobs))
        for job_id, view in zip(sorted(self.jobs), views, strict=True):
            job = self.jobs[job_id]
            assert view is not None
            assert (view.state, view.owner or "", view.version) == (job.state, job.owner, job.version), job_id
            if job.state in (JobState.QUEUED, JobState.RUNNING) and view.published:
                assert list(view.published) == job.offsets

    @invariant()
    def all_counters_match_the_keys(self) -> None:
        check(self.queue)

    @invariant()
    def the_batch_counts_its_jobs(self) -> None:
        batch = self.queue.run(calls.inspect_batch(self.queue.keys, "batch"))
        ended = [job for job in self.jobs.values() if job.state.is_terminal]
        assert (batch.total, batch.ended) == (len(self.jobs), len(ended))


SERVER: list[RedisServer] = []


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    if binary_of("valkey") is None:
        pytest.skip(how_to_get("valkey"))
    with redis_server("valkey") as server:
        SERVER.append(server)
        yield
        SERVER.clear()


TestScriptsMachine = ScriptsMachine.TestCase
TestScriptsMachine.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
