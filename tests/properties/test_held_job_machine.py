"""What always holds of the jobs that a worker holds, for any order of transitions that its threads may cause."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, precondition, rule

from sluice.engine.request import Finish, FinishReason, SequenceStats, TokenDelta
from sluice.protocol.calls import LeasedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobSpec
from sluice.worker.jobs.held_job import HeldJob, HoldState
from sluice.worker.jobs.leases import Leases
from sluice.worker.jobs.progress import pending_updates
from sluice.worker.jobs.results import Origin
from tests.examples import examples

KEYS = QueueKeys("q")
ORIGIN = Origin(model="m", fingerprint="f", worker="w")
ORDER = list(HoldState)
STOPS = st.sampled_from([JobState.CANCELLED, JobState.EXPIRED])


class HeldJobs(RuleBasedStateMachine):
    """Leases of three jobs, pulled again and again, each with two choices."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases()
        self.seen: list[HeldJob] = []
        self.states: dict[str, HoldState] = {}
        self.stops: dict[str, JobState] = {}
        self.num_output: dict[str, list[int]] = {}
        self.num_pulls = 0

    # ------------------------------------------------------------ transitions

    @rule(target=jobs, names=st.lists(st.sampled_from("abc"), max_size=2, unique=True), stream=st.booleans())
    def pull(self, names: list[str], stream: bool) -> object:
        """Lease jobs; one that is held already is leased anew."""
        self.num_pulls += 1
        jobs = [self.leases.new_job(self._leased(name), KEYS, JobSpec(stream=stream)) for name in names]
        older = [job for name in names if (job := self.leases.of_job(KEYS, JobId(f"0.t.{name}"))) is not None]
        assert self.leases.take(KEYS, self.num_pulls, jobs) == older
        for job in jobs:
            self.states[job.request_id] = job.state
            self.num_output[job.request_id] = [0, 0]
        self.seen += jobs
        return multiple(*jobs)

    def _leased(self, name: str) -> LeasedJob:
        return LeasedJob(
            id=JobId(f"0.t.{name}"), epoch=self.num_pulls, attempt=1, priority=0, spec=b"", payload=b"p", seed=1,
            choices=2, submitted_ms=0, pulled_ms=0, deadline_ms=None, prompt_tokens=1, published=(0, 0),
            ended=(False, False), fingerprint=None, fits=True,
        )  # fmt: skip

    @rule(job=jobs)
    def hand_over(self, job: HeldJob) -> None:
        """Admit as preparation does."""
        with self.leases.lock:
            if job.state is HoldState.PREPARING and job.stop is None:
                job.admit()

    @rule(job=jobs, choice=st.integers(0, 1), num_tokens=st.integers(1, 70), ends=st.booleans())
    def generate(self, job: HeldJob, choice: int, num_tokens: int, ends: bool) -> None:
        """Yield tokens of a choice that has not ended; the engine may still do so for a job that is lost."""
        if not job.was_admitted or job.choices[choice].end is not None:
            return
        start = self.num_output[job.request_id][choice]
        finish = Finish(reason=FinishReason.ABORTED if job.stop else FinishReason.LENGTH) if ends else None
        delta = TokenDelta(
            request_id=job.request_id, choice=choice, start=start, token_ids=(1,) * num_tokens, text="",
            stats=SequenceStats(num_prompt_tokens=1), finish=finish,
        )  # fmt: skip
        was_active = job.is_active
        is_due = job.add_output(delta, now_s=1.0, now_ms=1)
        if was_active:
            self.num_output[job.request_id][choice] += num_tokens
        else:
            assert not is_due

    @rule(job=jobs, state=STOPS)
    def flag(self, job: HeldJob, state: JobState) -> None:
        """The queue asks for an end."""
        is_first = job.request_id not in self.stops and job.is_held
        assert job.flag(state) == is_first
        if is_first:
            self.stops[job.request_id] = state

    @rule(job=jobs)
    def give_back(self, job: HeldJob) -> None:
        """A graceful shutdown returns the jobs that have no output and no end."""
        is_due = job.is_active and job.state is not HoldState.GENERATING and not job.has_ended
        assert job.give_back() == is_due

    @rule(job=jobs)
    def give_back_preempted(self, job: HeldJob) -> None:
        """A preempted job goes to another worker if it has no end and its channels lack nothing."""
        is_due = job.is_active and not job.has_ended and not job.has_updates
        assert job.give_back(with_output=True) == is_due

    @rule(job=jobs)
    def lose(self, job: HeldJob) -> None:
        """The lease is lost, or its return is acknowledged."""
        assert self.leases.remove(job) == (self.states[job.request_id] is not HoldState.RELEASED)

    @precondition(lambda self: any(job.is_active for job in self.seen))
    @rule(job=jobs)
    def publish(self, job: HeldJob) -> None:
        """The queue acknowledges all updates of an active job; a job whose every end it has is released."""
        if not job.is_active:
            return
        for one in list(pending_updates(job, ORIGIN, now_s=0.0)):
            job.acknowledge(one, now_s=0.0)
        if job.is_finished:
            self.leases.remove(job)

    @rule(job=jobs, choice=st.integers(0, 1), share=st.floats(0, 1))
    def lose_writes(self, job: HeldJob, choice: int, share: float) -> None:
        """Redis lost its last writes: the choice is published again from an earlier offset."""
        if job.is_active and not job.is_finished:
            published = job.choices[choice].published
            offset = int(published * share)
            job.resend_from(choice, offset)
            resent = job.choices if offset < published else [job.choices[choice]]
            assert not any(one.has_end for one in resent)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def states_go_forward(self) -> None:
        """No transition leads back, and none leaves `released`."""
        for job in self.seen:
            assert ORDER.index(job.state) >= ORDER.index(self.states[job.request_id])
            self.states[job.request_id] = job.state

    @invariant()
    def released_is_not_held(self) -> None:
        """A job is in the book exactly while it is not released, and a job id has one lease."""
        held = [job for job in self.seen if job.is_held]
        assert self.leases.all() == held
        assert len({job.id for job in held}) == len(held)
        assert dict(self.leases.held(KEYS).requests) == {job.id: job.request_id for job in held}

    @invariant()
    def only_admitted_jobs_generate(self) -> None:
        """Output and the state `generating` come after admission."""
        for job in self.seen:
            if job.state is HoldState.GENERATING or any(job.choices[n].token_ids for n in range(2)):
                assert job.was_admitted

    @invariant()
    def stops_stand(self) -> None:
        """The first final state that the queue asked for stands."""
        assert {job.request_id: job.stop for job in self.seen if job.stop} == self.stops

    @invariant()
    def nothing_is_published_that_was_not_generated(self) -> None:
        """Each choice has all tokens that it was given while active, and no more of them are published."""
        for job in self.seen:
            assert [len(one.token_ids) for one in job.choices] == self.num_output[job.request_id]
            assert all(one.published <= len(one.token_ids) for one in job.choices)
            assert not job.is_finished or not job.has_updates


HeldJobs.TestCase.settings = settings(max_examples=examples(600), stateful_step_count=40, deadline=None)
TestHeldJobs = HeldJobs.TestCase
