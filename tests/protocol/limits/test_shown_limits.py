"""What is left of limits, and why a job waits: as clients read them."""

import pytest

from sluice.producer.operations.totals import tenant_totals
from sluice.protocol import calls
from sluice.protocol.calls import TenantLimit
from sluice.protocol.wire import JobId
from tests.protocol.driving import Queue, ending, new_job


@pytest.fixture
def limited(queue: Queue) -> Queue:
    """A tenant that may run two jobs, of which three were submitted, and one that may take 20 tokens a minute."""
    queue.stop_clock()
    queue.configure(max_running={"few": 2}, tokens_per_minute={"slow": 20})
    queue.submit(*[new_job(f"few{i}", "few") for i in range(3)], *[new_job(f"slow{i}", "slow") for i in range(2)])
    queue.add("free", "free")
    return queue


@pytest.mark.every_server
class TestGivenTenantsWithLimits:
    def test_when_nothing_runs_then_all_of_them_is_left(self, limited: Queue) -> None:
        few, slow = limited.look().limits

        assert few == TenantLimit(
            tenant="few", max_running=2, tokens_per_minute=None, running=0, tokens_left=None, free_in_ms=None,
            is_at_limit=False,
        )  # fmt: skip
        assert (slow.tokens_per_minute, slow.tokens_left, slow.max_running) == (20, 20, None)

    def test_when_they_are_at_them_then_that_is_shown(self, limited: Queue) -> None:
        limited.worker("A").pull()

        few, slow = limited.look().limits

        assert (few.running, few.is_at_limit, few.free_in_ms) == (2, True, None)
        assert (slow.tokens_left, slow.is_at_limit, slow.free_in_ms) == (-10, True, 33_000)

    def test_when_a_job_waits_for_one_then_its_view_has_it(self, limited: Queue) -> None:
        worker = limited.worker("A")
        jobs = worker.pull().jobs
        waiting, running = limited.view(JobId("0.few.few2")), limited.view(jobs[0].id)

        assert waiting.limit is not None
        assert waiting.limit.running == 2
        assert running.limit is None
        worker.advance(ending(jobs[0], 0, 2))
        assert limited.view(waiting.id).limit is None

    def test_when_tenants_are_summed_up_then_limits_are_beside_what_waits(self, limited: Queue) -> None:
        limited.worker("A").pull()

        few, slow = tenant_totals("q", [limited.look()])

        assert (few.tenant, few.waiting, few.running, few.max_running, few.is_at_limit) == ("few", 1, 2, 2, True)
        assert (slow.tokens_left, slow.tokens_per_minute, slow.running) == (-10, 20, None)

    def test_when_they_are_many_then_pages_list_each(self, queue: Queue) -> None:
        queue.configure(max_running={f"t{i}": i for i in range(1500)})

        page = queue.run(calls.list_limits(queue.keys))
        found = list(page.limits)
        while page.cursor:
            page = queue.run(calls.list_limits(queue.keys, page.cursor))
            found += page.limits

        assert {limit.tenant: limit.max_running for limit in found} == {f"t{i}": i for i in range(1500)}

    def test_when_there_are_none_then_the_list_is_empty(self, queue: Queue) -> None:
        assert queue.run(calls.list_limits(queue.keys)) == calls.LimitsPage((), 0)
