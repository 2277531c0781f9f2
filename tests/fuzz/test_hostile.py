"""A hostile user with the documented rights to submit: jobs of others run, once and in time."""

from pathlib import Path

import pytest
import redis

from sluice.producer import Producer
from tests.fuzz.hostile.attack import Attacker, attack
from tests.fuzz.hostile.run import Settings, run
from tests.integration.workers import running_worker
from tests.security.acl import PASSWORD, QUEUE, set_users, url_of
from tests.servers import Flavor, RedisServer

SEED = 20_261
NUM_ROUNDS = 20


class TestGivenAHostileUser:
    def test_when_it_has_written_at_random_then_a_job_of_another_runs(self, valkey: RedisServer) -> None:
        set_users(valkey)
        attacker = Attacker(SEED)
        path = str(valkey.socket_path)
        with redis.Redis(unix_socket_path=path, username="acme-submit", password=PASSWORD) as client:
            rounds = [attack(client, attacker) for _ in range(NUM_ROUNDS)]

        with (
            Producer(valkey.url, queue=QUEUE) as owner,
            running_worker(url_of(valkey, "chat-worker"), queue__name=QUEUE),
        ):
            job = owner.submit("hello", tenant="victim", max_tokens=4, ignore_eos=True, wait_s=20)

            assert len(owner.result(job, timeout_s=20).choices[0].token_ids) == 4
        # Its rights let most of it pass.
        assert sum(taken for taken, _ in rounds) > 5 * sum(refused for _, refused in rounds)

    @pytest.mark.long
    @pytest.mark.timeout(400)
    @pytest.mark.parametrize("flavor", ["valkey", "redis-7.0"])
    def test_when_it_writes_on_then_others_lose_nothing(self, tmp_path: Path, flavor: Flavor) -> None:
        report = run(Settings(seed=SEED, folder=tmp_path, seconds=45, flavor=flavor))
        print(report.text())  # noqa: T201  # shown where it fails

        assert report.all_faults == []
