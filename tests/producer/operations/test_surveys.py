"""The state of a queue is whole, however many workers and tenants it has."""

from typing import Any

import pytest

from sluice.producer import Producer, job
from sluice.producer.operations.totals import tenant_totals
from sluice.protocol.calls import Beat, QueueSettings, beat
from sluice.protocol.limits import LANES_PER_PAGE
from sluice.protocol.redis.execution import run_many
from tests.integration.jobs import KEYS

NUM_TENANTS, NUM_WORKERS = LANES_PER_PAGE + 100, 150


class TestGivenManyTenantsAndWorkers:
    def test_when_the_queue_is_read_then_it_has_all_of_them(
        self,
        producer: Producer,
        redis_client: Any,  # Any: a redis-py client
    ) -> None:
        about = {"model": "m", "tokens_per_s": "1"}
        beats = [
            Beat(incarnation=f"w{number}", held=(), processed_pull=0, expiry_ms=60_000, about=about)
            for number in range(NUM_WORKERS)
        ]
        run_many(redis_client, [beat(KEYS, one) for one in beats])
        jobs = [job("a", tenant=f"t{number}", max_tokens=1) for number in range(NUM_TENANTS)]
        assert len(list(producer.submit_many(jobs))) == NUM_TENANTS
        producer.configure(QueueSettings(mode="fair", weights={f"w{number}": 2.0 for number in range(NUM_TENANTS)}))

        [view] = producer.queue()

        assert (len(view.lanes), len(view.workers), view.tokens_per_s) == (NUM_TENANTS, NUM_WORKERS, NUM_WORKERS)
        found = tenant_totals("default", [view])
        assert len(found) == 2 * NUM_TENANTS
        assert {one.share for one in found if one.waiting} == {1 / NUM_TENANTS}


class TestGivenAWeightThatAnotherUserWrote:
    @pytest.mark.parametrize("text", ["abc", "nan", "-1", "0", "1e9", "inf", "", b"\xff"])
    def test_when_it_is_no_weight_then_it_counts_as_one_as_in_the_scripts(
        self,
        producer: Producer,
        redis_client: Any,
        text: str | bytes,  # Any: a redis-py client
    ) -> None:
        list(producer.submit_many([job("a", tenant="t")]))
        redis_client.hset(KEYS.key("weights"), "t", text)

        [found] = tenant_totals("default", producer.queue())

        assert found.weight == 1.0
