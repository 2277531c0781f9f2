"""How many preempted jobs go to an idle worker, by what its heartbeat says."""

from sluice.protocol.calls import LeasedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobId, JobOptions, JobSpec
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.serve.give_back import IdleWorker


def new_job(number: int, *, prompt_tokens: int = 10, choices: int = 1) -> HeldJob:
    leased = LeasedJob(
        id=JobId(f"0.t.{number}"), epoch=1, attempt=1, priority=0, spec=b"", payload=b"", seed=1, choices=choices,
        submitted_ms=0, pulled_ms=0, deadline_ms=None, prompt_tokens=prompt_tokens, published=(0,) * choices,
        ended=(False,) * choices, fingerprint=None, fits=True,
    )  # fmt: skip
    return Leases().new_job(leased, QueueKeys("q"), JobSpec(options=JobOptions(max_tokens=100, n=choices)))


def chosen(jobs: list[HeldJob], **about: str) -> list[HeldJob]:
    return IdleWorker.read("other", about).choose(jobs, reserve_tokens=90)


class TestGivenManyPreemptedJobs:
    """Each needs 100 tokens of the cache, by what the queue reserves."""

    def test_when_a_worker_with_few_places_idles_then_it_has_no_more_jobs_than_places(self) -> None:
        jobs = [new_job(number) for number in range(64)]

        assert chosen(jobs, places="1", kv_tokens_total="100000") == jobs[:1]
        assert chosen(jobs, places="3", kv_tokens_total="100000") == jobs[:3]
        assert chosen(jobs, places="100", kv_tokens_total="100000") == jobs

    def test_when_its_cache_is_small_then_it_has_those_that_fit_together(self) -> None:
        large, *small = [new_job(0, prompt_tokens=1000), *(new_job(number) for number in range(1, 8))]

        assert chosen([large, *small], places="8", kv_tokens_total="399") == small[:3]
        assert chosen([large], places="8", kv_tokens_total="1089") == []
        assert chosen([large], places="8", kv_tokens_total="1090") == [large]

    def test_when_its_cache_holds_one_long_job_then_that_one_fits(self) -> None:
        large = new_job(0, prompt_tokens=1000)

        assert chosen([large], places="8", kv_tokens_total="399", largest_job_tokens="1090") == [large]

    def test_when_a_job_has_several_choices_then_each_takes_a_place(self) -> None:
        three, one, two = new_job(0, choices=3), new_job(1), new_job(2, choices=2)

        assert chosen([three, one, two], places="2") == [one]
        assert chosen([three, one, two], places="4") == [three, one]

    def test_when_the_heartbeat_does_not_tell_its_places_then_one_job_goes(self) -> None:
        jobs = [new_job(number) for number in range(4)]

        assert chosen(jobs) == jobs[:1]
        assert chosen(jobs, places="-", kv_tokens_total="?") == jobs[:1]
