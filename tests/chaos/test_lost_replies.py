"""Connections that break between a call and its reply: nothing is lost, nothing is applied twice."""

import random
import tempfile
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sluice.protocol.scripts import load
from sluice.protocol.wire import JobOptions
from tests.chaos.faults.proxies import Cut, cutting_proxy
from tests.integration.jobs import (
    KEYS,
    Ask,
    check_every_token_once,
    check_nothing_is_left,
    field_of,
    num_on_channel,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.workers import running_worker
from tests.servers import RedisServer


def sha_of(script: str) -> bytes:
    """By what a pipeline names a script."""
    return load(script).sha1.encode()


def cut_each_first(script: str, times: int) -> Cut:
    """Lose the replies to the first calls of a script."""
    sha, left = sha_of(script), [times]

    def cut(data: bytes) -> bool:
        if sha in data and left[0] > 0:
            left[0] -= 1
            return True
        return False

    return cut


def cut_at_random(seed: int, one_in: int) -> Cut:
    """Lose random replies."""
    dice = random.Random(seed)
    return lambda _data: dice.randrange(one_in) == 0


@pytest.fixture
def socket_path() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        yield Path(folder) / "proxy.sock"


class TestGivenAWorkerBehindABadConnection:
    @pytest.mark.parametrize("script", ["pull", "advance", "beat"])
    def test_when_replies_of_a_script_are_lost_then_each_token_is_published_once(
        self, valkey: RedisServer, socket_path: Path, script: str
    ) -> None:
        asks = [Ask(options=JobOptions(max_tokens=30), seed=i) for i in range(8)]
        client = valkey.client()
        with client, cutting_proxy(socket_path, valkey.socket_path, cut_each_first(script, 5)) as proxy:
            job_ids = submit_all(client, asks)
            with running_worker(proxy.url, model__path="null?step_s=0.01"):
                wait_for_ends(client, job_ids)
            check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
            check_nothing_is_left(client)
            attempts = {int(field_of(client, one, "attempt") or 0) for one in job_ids}

        assert proxy.num_cuts >= 2
        assert attempts == {1}, "a repeated pull brings the same leases"

    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_when_any_reply_may_be_lost_then_each_token_is_published_once(
        self, valkey: RedisServer, socket_path: Path, seed: int
    ) -> None:
        asks = [Ask(options=JobOptions(max_tokens=5 + i, n=1 + i % 3), seed=i) for i in range(30)]
        client = valkey.client()
        with client, cutting_proxy(socket_path, valkey.socket_path, cut_at_random(seed, 12)) as proxy:
            job_ids = submit_all(client, asks)
            with running_worker(proxy.url, batching__max_num_seqs=8, model__path="null?step_s=0.001"):
                wait_for_ends(client, job_ids)
            check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
            check_nothing_is_left(client)

        assert proxy.num_cuts > 0


class Swallow:
    """Drop one heartbeat, and all that follows it on its connection. Mutable: it is armed once."""

    def __init__(self) -> None:
        self.is_armed = False

    def __call__(self, data: bytes) -> bool:
        is_now = self.is_armed and sha_of("beat") in data
        self.is_armed = self.is_armed and not is_now
        return is_now


class TestGivenAConnectionThatStandsAndPassesNothing:
    """Half-open, as after a firewall dropped its state. Another worker is ready to reclaim."""

    def test_when_a_heartbeat_gets_no_reply_then_the_next_is_sent_before_it_expires(
        self, valkey: RedisServer, socket_path: Path
    ) -> None:
        asks = [Ask(options=JobOptions(max_tokens=120), seed=i) for i in range(4)]
        client, swallow = valkey.client(), Swallow()
        with ExitStack() as stack, client:
            client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
            proxy = stack.enter_context(cutting_proxy(socket_path, valkey.socket_path, swallow, "half-open"))
            slow = running_worker(proxy.url, model__path="null?step_s=0.03", beat__every_s=1.0, beat__life_s=6.0)
            stack.enter_context(slow)
            job_ids = submit_all(client, asks)
            wait_until(lambda: all(num_on_channel(client, one) for one in job_ids), "all are taken")
            stack.enter_context(running_worker(valkey.url))
            swallow.is_armed = True
            wait_for_ends(client, job_ids)

            check_every_token_once(client, dict(zip(job_ids, asks, strict=True)))
            assert proxy.num_cuts == 1
            assert {field_of(client, one, "attempt") for one in job_ids} == {"1"}, "no lease was lost"
