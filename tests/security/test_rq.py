"""A client with write access to rq's Redis cannot make our rq workers run anything but our tasks."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sluice.producer import verify_webhook
from sluice.protocol.webhooks import tenant_secrets
from tests.history.test_recorder import client_of
from tests.servers import RedisServer
from tests.worker.callbacks.receiver import receiver
from tests.worker.callbacks.test_callbacks import SECRET, end_job, mover, settings_for, webhooks_of, work

CREATED = "2026-01-01T00:00:00.000000Z"


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def put(client: Any, valkey: RedisServer, data: bytes, **fields: str | bytes) -> None:  # Any: a redis-py client
    """Write a job into rq's queue as any program could: a hash, and its id on the list."""
    queue = settings_for(valkey).rq_names.webhooks
    known: dict[str, str | bytes] = {"created_at": CREATED, "origin": queue, "data": data, "status": "queued"}
    client.hset("rq:job:evil", mapping={**known, **fields})
    client.sadd("rq:queues", f"rq:queue:{queue}")
    client.rpush(f"rq:queue:{queue}", "evil")


def call(function: str, *arguments: object, instance: object = None) -> bytes:
    """What rq's JSON serializer reads."""
    return json.dumps([function, instance, arguments, {}]).encode()


def state_of_evil(client: Any) -> str:  # Any: as above
    """Return rq's final state of the job."""
    return client.hget("rq:job:evil", "status").decode()


class TestGivenAForeignJobInRqsQueue:
    @pytest.mark.parametrize("field", ["data", "meta"])
    def test_when_it_is_a_pickle_then_it_is_not_unpickled(
        self, valkey: RedisServer, tmp_path: Path, field: str
    ) -> None:
        client, made = client_of(valkey), tmp_path / "made"
        bomb = pickle.dumps(("os.mkdir", None, (Bomb(made),), {}))
        put(client, valkey, **{"data": call("os.mkdir", str(made)), field: bomb})

        work(client, settings_for(valkey))

        assert not made.exists()
        assert client.llen(f"rq:queue:{settings_for(valkey).rq_names.webhooks}") == 0
        # It is a bomb: read as rq would by default, it goes off.
        pickle.loads(bomb)
        assert made.exists()

    @pytest.mark.parametrize(
        "function",
        [
            "os.mkdir",
            "sluice.worker.callbacks.chores.Path.mkdir",
            "sluice.worker.callbacks.chores.open_database",
            "sluice.gateway.tasks.bind",
            "sluice.gateway.tasks.ContextVar",
        ],
    )
    def test_when_it_names_another_function_then_that_is_not_called(
        self, valkey: RedisServer, tmp_path: Path, function: str
    ) -> None:
        client, made = client_of(valkey), tmp_path / "made"
        put(client, valkey, call(function, str(made)))

        work(client, settings_for(valkey))

        assert not made.exists()
        assert state_of_evil(client) == "failed"

    def test_when_it_names_callbacks_and_addresses_then_no_call_is_made(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        client, log = client_of(valkey), tmp_path / "log"
        with receiver() as hook:
            address = json.dumps([{"url": hook.url, "event": "failed"}, {"url": hook.url, "event": "finished"}])
            names = ("success_callback_name", "failure_callback_name", "stopped_callback_name")
            touch = dict.fromkeys(names, f"{__name__}.note")
            os.environ["SLUICE_TEST_NOTE"] = str(log)
            try:
                put(
                    client, valkey, call("sluice.worker.callbacks.chores.retain", None, None), webhooks=address, **touch
                )
                work(client, settings_for(valkey))
            finally:
                del os.environ["SLUICE_TEST_NOTE"]

            assert state_of_evil(client) == "finished"
            assert hook.got == []
            assert not log.exists()

    def test_when_it_exports_into_a_folder_of_its_own_then_nothing_is_written(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        client, made = client_of(valkey), tmp_path / "made"
        put(client, valkey, call("sluice.worker.callbacks.chores.export", "q", "b", str(made)))

        work(client, settings_for(valkey, export_folder=str(tmp_path / "exports")))

        assert not made.exists()


class TestGivenADamagedRecordInRqsRedis:
    """Its other jobs go on; it is passed over, and logged once."""

    @pytest.mark.parametrize(
        "damage", [{"meta": b"\x80"}, {"created_at": b"\xff"}, {"ttl": "no"}, {"timeout": "\x00"}], ids=str
    )
    def test_when_it_waits_for_a_retry_then_others_are_sent(
        self, valkey: RedisServer, damage: dict[str, str | bytes]
    ) -> None:
        client = client_of(valkey)
        with receiver() as hook, capture_logs() as lines:
            call_hook = call("sluice.worker.callbacks.chores.deliver_webhook", hook.url, "evt_1", "{}")
            put(client, valkey, call_hook, **damage)
            queue = webhooks_of(settings_for(valkey), client)
            client.lrem(queue.key, 0, "evil")
            client.zadd(queue.scheduled_job_registry.key, {"evil": 1})
            end_job(client, hook.url)

            mover(valkey).drain()
            work(client, settings_for(valkey))

            [(headers, body)] = hook.got
            assert verify_webhook(tenant_secrets(SECRET, "acme"), headers, body)
        assert [line["event"] for line in lines].count("damaged rq record skipped") == 1
        assert client.zcard(queue.scheduled_job_registry.key) == queue.count == 0


def note(*_arguments: object) -> None:
    """A callback that leaves a trace."""
    Path(os.environ["SLUICE_TEST_NOTE"]).mkdir()
