"""The live stream of a job while its queue is away for longer than a gateway waits."""

from dataclasses import replace
from pathlib import Path

import pytest

from sluice.gateway.queues import Queues
from sluice.gateway.settings import GatewaySettings
from sluice.gateway.ui.pages.jobstream import TextFeed
from sluice.producer.aio import AsyncProducer
from sluice.producer.operations.follow import cursor_at
from sluice.protocol.wire import JobId


@pytest.mark.slow
class TestGivenAQueueThatStaysAway:
    async def test_when_text_is_waited_for_then_the_stream_ends_to_be_resumed(self, tmp_path: Path) -> None:
        url = f"unix://{tmp_path}/nobody.sock"
        settings = GatewaySettings(redis_url=url, database_url="sqlite:////nowhere/keys.db")
        async with Queues(settings) as queues, AsyncProducer(url, patience_s=0.1) as following:
            queue = replace(queues.first, following=following)

            text = TextFeed(queue, JobId("0.acme.1"), [cursor_at(0)])
            await text.send()

        sent = text.sent
        assert [sent.get_nowait(), sent.get_nowait()] == [b"event: over\ndata: {}\n\n", None]
