"""`producer tenants`, and limits of tenants set by `producer queues set`."""

import json
from typing import Any

import pytest

from sluice.producer import Producer
from sluice.protocol.calls import PullRequest, pull
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run as run_call
from tests.producer.cli.conftest import Run


def start_all(client: Any) -> None:  # Any: a redis-py client
    """Lease what a worker with much room may have."""
    room = PullRequest(
        incarnation="w", number=1, kv_tokens=10**6, prefill_tokens=10**6, sequences=1000, cache_tokens=10**6,
        is_empty=False,
    )  # fmt: skip
    run_call(client, pull(QueueKeys("default"), room))


class TestGivenTenantsWithLimits:
    @pytest.fixture
    def _limited(self, run: Run, producer: Producer, redis_client: Any) -> None:
        limits = ("--max-running", "acme=1", "--tokens-per-minute", "slow=100", "--weight", "acme=2")
        assert run("queues", "set", *limits).code == 0
        for tenant in ("acme", "acme", "slow", "free"):
            producer.submit("hello", tenant=tenant, max_tokens=1000)
        start_all(redis_client)

    @pytest.mark.usefixtures("_limited")
    def test_when_they_are_listed_then_limits_are_beside_what_waits(self, run: Run) -> None:
        found = {row["tenant"]: row for row in json.loads(run("tenants", "--json").output())}

        assert found.keys() == {"acme", "slow"}
        acme, slow = found["acme"], found["slow"]
        assert (acme["waiting"], acme["running"], acme["max_running"], acme["is_at_limit"]) == (1, 1, 1, True)
        assert (slow["tokens_per_minute"], slow["running"], slow["is_at_limit"]) == (100, None, True)
        assert slow["tokens_left"] < 0
        assert run("tenants").out.splitlines()[0].startswith("tenant\twaiting\ttokens")

    @pytest.mark.usefixtures("_limited")
    def test_when_a_limit_is_removed_then_none_is_shown(self, run: Run) -> None:
        assert run("queues", "set", "--max-running", "acme=none", "--tokens-per-minute", "slow=none").code == 0

        (acme,) = json.loads(run("tenants", "--json").output())
        assert (acme["tenant"], acme["max_running"], acme["is_at_limit"]) == ("acme", None, False)

    @pytest.mark.parametrize(
        ("option", "said"),
        [
            (
                ("--max-running", "acme"),
                "--max-running is TENANT=NUMBER, or TENANT=none to remove",
            ),
            (("--max-running", "acme=-1"), "max_running of tenant acme must be from 0 to 1000000000000, got -1"),
            (
                ("--tokens-per-minute", "acme=0"),
                "tokens_per_minute of tenant acme must be from 1 to 1000000000000",
            ),
        ],
    )
    def test_when_a_limit_is_wrong_then_that_is_said(self, run: Run, option: tuple[str, ...], said: str) -> None:
        ended = run("queues", "set", *option)

        assert ended.code == 2
        assert said in ended.err
