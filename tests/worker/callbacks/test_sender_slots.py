"""Slow receivers of one tenant do not delay those of others: it uses all senders but one at most."""

import multiprocessing
import socket
import time
from collections.abc import Generator

import pytest

from sluice.worker.callbacks.command import main
from sluice.worker.callbacks.events import Event
from sluice.worker.callbacks.sender_slots import SenderSlots
from tests.history import events as e
from tests.history.test_recorder import client_of, until
from tests.servers import RedisServer
from tests.worker.callbacks.receiver import Receiver, receiver
from tests.worker.callbacks.test_callbacks import (
    complete_batch,
    end_job,
    mover,
    settings_for,
    try_now,
    webhooks_of,
    work,
)


@pytest.fixture
def hook() -> Generator[Receiver]:
    """A receiver."""
    with receiver() as state:
        yield state


def slots(valkey: RedisServer, tenant: str = "acme", limit: int = 1, held_s: float = 60.0) -> SenderSlots:
    """The slots of a tenant."""
    data = {"queue": e.QUEUE, "job_id": f"0.{tenant}.1"} if tenant else {"queue": e.QUEUE, "batch": "b"}
    event = Event.of("http://x", "job.done", 0, data, of_what="x")
    return SenderSlots(client_of(valkey), event.body, limit=limit, held_s=held_s)


class TestGivenATenantThatUsesItsSlots:
    """Another sender delivers one of its webhooks."""

    @pytest.fixture(autouse=True)
    def other(self, valkey: RedisServer) -> SenderSlots:
        other = slots(valkey)
        assert other.take("evt_other")
        return other

    def test_when_its_next_webhook_comes_then_only_those_of_others_are_sent(
        self, valkey: RedisServer, hook: Receiver, other: SenderSlots
    ) -> None:
        client, settings = client_of(valkey), settings_for(valkey, webhook_workers=2)
        queue = webhooks_of(settings, client)
        for job_id in ("0.acme.1", "0.acme.2", "0.honest.1"):
            end_job(client, hook.url, job_id)
        mover(valkey).drain()

        work(client, settings)
        sent = [body for _, body in hook.got]
        assert len(sent) == 1
        assert b"0.honest.1" in sent[0]
        assert queue.failed_job_registry.count == 0
        other.leave("evt_other")
        try_now(webhooks_of(settings, client))
        work(client, settings)

        assert len(hook.got) == 3
        assert queue.scheduled_job_registry.count == 0

    def test_when_a_webhook_was_put_off_then_it_has_all_its_tries(
        self, valkey: RedisServer, hook: Receiver, other: SenderSlots
    ) -> None:
        client, settings = client_of(valkey), settings_for(valkey, webhook_workers=2)
        hook.answers += [500, 500]
        end_job(client, hook.url)
        mover(valkey).drain()
        work(client, settings)
        assert hook.got == []

        other.leave("evt_other")
        try_now(webhooks_of(settings, client))
        work(client, settings)

        assert len(hook.got) == 3, "one try and two more"

    def test_when_batches_end_then_they_have_slots_of_their_own(self, valkey: RedisServer, hook: Receiver) -> None:
        client = client_of(valkey)
        complete_batch(client, hook.url)

        mover(valkey).drain()
        work(client, settings_for(valkey))

        assert len(hook.got) == 1


class TestGivenSlots:
    def test_when_all_are_taken_then_another_event_gets_none_and_the_same_one_its_own(
        self, valkey: RedisServer
    ) -> None:
        mine = slots(valkey, limit=2)

        assert [mine.take(event) for event in ("a", "b", "c", "a")] == [True, True, False, True]
        mine.leave("a")
        assert mine.take("c")
        assert slots(valkey, "", limit=1).take("d")

    def test_when_a_sender_was_killed_then_its_slot_is_free_after_the_longest_delivery(
        self, valkey: RedisServer
    ) -> None:
        killed, other = slots(valkey, held_s=0.05), slots(valkey)
        assert killed.take("a")

        until(lambda: other.take("b"), "the slot is free")


@pytest.mark.long
class TestGivenATenantWhoseReceiversDrip:
    def test_when_another_tenants_job_ends_then_its_receiver_is_called_at_once(
        self, valkey: RedisServer, sqlite_url: str, hook: Receiver
    ) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
            client = client_of(valkey)
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
            for number in range(8):
                end_job(client, url, f"0.acme.{number}")
            process = multiprocessing.get_context("spawn").Process(
                target=main, args=(settings_for(valkey, sqlite_url, webhook_workers=2, timeout_s=5.0),)
            )
            process.start()
            try:
                silent.settimeout(30)
                hanging, _ = silent.accept()
                with hanging:
                    begin_s = time.monotonic()
                    end_job(client, hook.url, "0.honest.1")
                    until(lambda: len(hook.got) == 1, "the honest one is called")
                    took_s = time.monotonic() - begin_s
            finally:
                process.terminate()
                process.join(20)

        assert took_s < 4.0, "less than one silent delivery takes"
