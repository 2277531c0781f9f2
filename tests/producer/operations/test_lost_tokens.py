"""A reader whose channel has lost tokens that it has not seen: it gets them from the result, or an error."""

from typing import Any

import pytest

from sluice.producer import Producer
from sluice.producer.errors import ChannelExpired
from sluice.producer.operations.follow import Cursor
from sluice.protocol.states import JobState
from sluice.protocol.wire import decode_entry
from tests.producer.worker_side import HandWorker


@pytest.fixture
def running(producer: Producer, worker: HandWorker) -> Any:
    """It has published four tokens."""
    producer.submit("hello", max_tokens=10)
    [leased] = worker.pull()
    for token, text in enumerate("abcd"):
        worker.say(leased, [token], text)
    return leased


class TestGivenAJobThatWasCancelledAtAHandOver:
    """It has tokens and no result: no worker ended it."""

    @pytest.fixture
    def cancelled(self, producer: Producer, worker: HandWorker, running: Any) -> Any:
        producer.cancel(running.id)
        worker.deregister([running])
        return running

    def test_when_its_channel_has_expired_then_a_reader_learns_what_it_lacks(
        self, producer: Producer, worker: HandWorker, cancelled: Any, redis_client: Any
    ) -> None:
        redis_client.delete(worker.keys.channel(cancelled.id))

        with pytest.raises(ChannelExpired, match=r"cancelled: .* lost the output after token 1"):
            list(producer.stream(cancelled.id, Cursor(1, 1)))

    def test_when_a_reader_has_all_tokens_then_it_gets_the_end(
        self, producer: Producer, worker: HandWorker, cancelled: Any, redis_client: Any
    ) -> None:
        redis_client.delete(worker.keys.channel(cancelled.id))

        [event] = producer.stream_many([(cancelled.id, "4:4")])

        assert (event.token_ids, event.end and event.end.state) == ((), JobState.CANCELLED)


class TestGivenAChannelThatWasDeletedWhileItsJobRan:
    """Later entries begin where the deleted ones ended; a reader has fewer tokens."""

    @pytest.fixture(autouse=True)
    def deleted(self, worker: HandWorker, running: Any, redis_client: Any) -> None:
        redis_client.delete(worker.keys.channel(running.id))

    def test_when_the_job_goes_on_then_the_reader_learns_what_it_lacks(
        self, producer: Producer, worker: HandWorker, running: Any
    ) -> None:
        worker.say(running, [4], "e")

        with pytest.raises(ChannelExpired, match=r"running: .* after token 1.* Read its result"):
            list(producer.stream(running.id, "1:1", timeout_s=5))

    def test_when_the_job_is_done_then_the_reader_gets_the_rest_from_the_result(
        self, producer: Producer, worker: HandWorker, running: Any
    ) -> None:
        worker.say(running, [4], "e", end=JobState.DONE)

        [event] = producer.stream(running.id, "1:1")

        assert (event.token_ids, event.text, event.cursor) == ((1, 2, 3, 4), "bcde", "5:5:end")

    def test_when_it_is_cancelled_at_a_hand_over_then_the_end_does_not_hide_the_loss(
        self, producer: Producer, worker: HandWorker, running: Any, redis_client: Any
    ) -> None:
        producer.cancel(running.id)
        worker.deregister([running])

        [(_, fields)] = redis_client.xrange(worker.keys.channel(running.id))
        assert decode_entry(fields[b"e"]).start == 4
        with pytest.raises(ChannelExpired, match=r"cancelled: .* after token 0"):
            list(producer.stream(running.id))
