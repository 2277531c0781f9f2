"""A suspect of one queue runs alone on a worker that serves another queue, too."""

from typing import Any

from sluice.protocol.calls import inspect
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobOptions
from tests.integration.jobs import Ask, num_on_channel, state_of, submit_all, wait_for_ends, wait_until
from tests.integration.workers import running_worker
from tests.protocol.deaths.test_suspects import kill, pass_by
from tests.protocol.driving import Queue
from tests.servers import RedisServer

CHAT, BATCH = QueueKeys("chat"), QueueKeys("batch")
SHORT = Ask(options=JobOptions(max_tokens=10), stream=False)
LONG = Ask(options=JobOptions(max_tokens=200))


def chat_jobs(client: Any) -> tuple[int, int]:
    """How many run, and how many wait."""
    view = run(client, inspect(CHAT))
    return view.running_jobs, view.waiting_jobs


class TestGivenASuspectThatHasWaited:
    """Two workers died with it. The other queue has more jobs than the worker runs, and gets more again and again."""

    def test_when_a_worker_serves_both_then_it_runs_without_jobs_of_the_other(self, valkey: RedisServer) -> None:
        with valkey.client() as client:
            queue = Queue(client, BATCH)
            queue.stop_clock()
            [suspect] = submit_all(client, [LONG], keys=BATCH)
            kill(queue, "A", "B")
            pass_by(queue, "C")
            assert state_of(client, suspect, keys=BATCH) is JobState.QUEUED
            for keys in (CHAT, BATCH):
                # It has waited for an hour.
                client.hdel(keys.key("config"), "test_clock_ms")
                client.hset(keys.key("config"), "test_clock_offset_ms", 2 * 3_600_000)
            chat = submit_all(client, [LONG] + [SHORT] * 59, keys=CHAT)

            with running_worker(
                valkey.url, model__path="null?step_s=0.01", batching__max_num_seqs=2, queue__name=("chat", "batch")
            ):
                wait_until(lambda: client.exists(BATCH.key("isolator")) == 1, "it drains")
                wait_until(lambda: chat_jobs(client)[0] == 1, "the long one runs, and a place is free")
                _, waiting = chat_jobs(client)
                chat += submit_all(client, [SHORT], keys=CHAT)
                wait_until(lambda: num_on_channel(client, suspect, keys=BATCH) >= 20, "it generates")
                chat += submit_all(client, [SHORT], keys=CHAT)
                wait_until(lambda: num_on_channel(client, suspect, keys=BATCH) >= 100, "it generates on")
                beside = chat_jobs(client)
                is_still_running = state_of(client, suspect, keys=BATCH) is JobState.RUNNING
                wait_for_ends(client, [suspect], keys=BATCH)
                wait_for_ends(client, chat, keys=CHAT)

        assert (beside, is_still_running) == ((0, waiting + 2), True)
