"""A worker ends what it runs at its deadline, however late the queue's timers fire. On a real server."""

from sluice.protocol.clock import wall_ms
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from tests.integration.jobs import KEYS, Ask, state_of, submit_all, wait_for_ends, wait_until
from tests.integration.workers import running_worker
from tests.servers import RedisServer

LONG = JobOptions(max_tokens=8_000, ignore_eos=True)


class TestGivenARunningJobWithADeadline:
    def test_when_its_timer_does_not_fire_then_its_worker_ends_it(self, valkey: RedisServer) -> None:
        with valkey.client() as client, running_worker(valkey.url, model__path="null?step_s=0.005"):
            timed, other = submit_all(
                client, [Ask(options=LONG, deadline_ms=wall_ms() + 3000), Ask(options=JobOptions(max_tokens=5))]
            )
            wait_until(lambda: client.exists(KEYS.channel(timed)) == 1, "it generates")
            # As if thousands of timers were due before it.
            assert client.zrem(KEYS.key("timers"), f"deadline|{timed}") == 1

            wait_for_ends(client, [timed, other])

            assert [state_of(client, one) for one in (timed, other)] == [JobState.EXPIRED, JobState.DONE]
