"""A call's cost does not depend on what other tenants have, or on what one tenant has heaped up."""

from sluice.producer.contract import calls
from sluice.producer.contract.calls import Beat, PullRequest
from tests.contract.costs import Cost, cost_of
from tests.contract.driving import Queue, ending, new_job


def pull(queue: Queue, number: int = 1) -> calls.Call[calls.PullReply]:
    request = PullRequest(
        incarnation="A",
        number=number,
        kv_tokens=100_000,
        prefill_tokens=100_000,
        sequences=1000,
        cache_tokens=100_000,
        is_empty=False,
    )
    return calls.pull(queue.keys, request)


class TestGivenManyWeights:
    def costs(self, queue: Queue) -> list[Cost]:
        """Of a job's whole life, and a beat."""
        submitted = cost_of(queue, calls.submit(queue.keys, [new_job("one")]))
        pulled = cost_of(queue, pull(queue))
        [job] = queue.worker("A").pull(number=1).jobs
        ended = cost_of(queue, calls.advance(queue.keys, "A", [ending(job, 0, 3)]))
        beat = Beat(incarnation="A", held=(), processed_pull=1, expiry_ms=4000)
        return [submitted, pulled, ended, cost_of(queue, calls.beat(queue.keys, beat))]

    def test_when_a_job_of_one_tenant_runs_then_the_others_are_not_read(self, one_queue: Queue) -> None:
        alone = self.costs(one_queue)
        one_queue.client.flushall()
        one_queue.step_clock(0)
        one_queue.configure(weights={f"t{i}": 2.0 for i in range(1000)})

        among_many = self.costs(one_queue)

        assert [many.commands for many in among_many] == [one.commands for one in alone]
        assert [many.values - one.values for one, many in zip(alone, among_many, strict=True)] == [0] * 4
