"""A worker serves other tenants while a tenant's damaged jobs lie in its queue. On a real server."""

import pytest

from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from tests.grids import fast_only
from tests.integration.jobs import KEYS, Ask, state_of, submit_all, wait_for_ends, wait_until
from tests.integration.workers import running_worker
from tests.protocol.driving import Queue
from tests.protocol.hostile.test_damaged_jobs import POISONS, READABLE, damage
from tests.servers import RedisServer

EVIL = Ask(tenant="evil", options=JobOptions(max_tokens=5))
DAMAGES = [*POISONS, *READABLE]


class TestGivenDamagedJobsInEveryPlace:
    def test_when_others_submit_then_they_are_served_meanwhile(self, valkey: RedisServer) -> None:
        victims = [Ask(tenant="victim", options=JobOptions(max_tokens=5)) for _ in range(20)]
        with valkey.client() as client:
            waiting = submit_all(client, [EVIL] * len(DAMAGES))
            for job_id, (field, value) in zip(waiting, DAMAGES, strict=True):
                damage(Queue(client, KEYS), job_id, field, value)
            with running_worker(valkey.url) as worker, running_worker(valkey.url):
                wait_for_ends(client, submit_all(client, victims))

                assert worker.exit_code is None
                assert not Queue(client, KEYS).leases()

    @pytest.mark.parametrize(("field", "value"), fast_only(DAMAGES[:1], [*DAMAGES[1:], ("state", "done")]))
    def test_when_one_is_damaged_as_it_runs_then_its_worker_lives(
        self, valkey: RedisServer, field: str, value: object
    ) -> None:
        slow = Ask(tenant="evil", options=JobOptions(max_tokens=2000, ignore_eos=True))
        with valkey.client() as client, running_worker(valkey.url, model__path="null?step_s=0.002") as worker:
            (running,) = submit_all(client, [slow])
            wait_until(lambda: client.exists(KEYS.channel(running)) == 1, "it generates")

            damage(Queue(client, KEYS), running, field, value)
            others = submit_all(client, [Ask(options=JobOptions(max_tokens=5))])
            wait_for_ends(client, others)
            wait_until(lambda: running not in Queue(client, KEYS).leases(), "its lease is gone")

            assert [state_of(client, one) for one in others] == [JobState.DONE]
            assert worker.exit_code is None
