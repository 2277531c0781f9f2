"""An id may be used again once its job is forgotten: nothing of the old job is left for the new one or its readers."""

import pytest

from sluice.protocol.states import JobState
from tests.integration.jobs import wait_until
from tests.protocol.driving import Queue, ending, new_job, tokens


class TestGivenResultsThatAreKeptForLessTimeThanChannels:
    @pytest.fixture(autouse=True)
    def settings(self, queue: Queue) -> None:
        queue.configure(result_ttl_ms=50, channel_ttl_ms=60_000)

    def test_when_an_id_is_used_again_then_its_channel_begins_anew(self, queue: Queue) -> None:
        one, worker = queue.add("same"), queue.worker("A")
        job = worker.take()
        worker.advance(tokens(job, 0, 5))
        worker.advance(ending(job, 5))
        wait_until(lambda: not queue.client.exists(queue.keys.job(one)), "the job is forgotten")

        queue.add("same", digest=b"another")
        assert queue.channel(one) == []
        job = worker.take()

        assert [str(answer) for answer in worker.advance(tokens(job, 0, 1))] == ["Ok(stop=None)"]
        assert [entry.token_ids for _, entry in queue.channel(one)] == [(0,)]

    def test_when_the_dead_set_forgets_a_job_then_its_channel_goes_with_it(self, queue: Queue) -> None:
        queue.configure(dead_set_max=1)
        worker = queue.worker("A")
        for name in ("old", "new"):
            queue.add(name)
            job = worker.take()
            worker.advance(tokens(job, 0, 1))
            worker.advance(ending(job, 1, state=JobState.FAILED))
            queue.pass_time(1)

        wait_until(lambda: not queue.client.exists(queue.keys.job(new_job("old").id)), "the job is forgotten")

        assert queue.names("channel:*") == {"channel:t:new:0"}
