"""Names that the server does not know, of queues, batches and jobs; and queues of several partitions."""

import json
from typing import Any

import pytest

from sluice.producer import Producer
from sluice.protocol.calls import Beat, QueueSettings, beat
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run as execute
from sluice.protocol.states import JobState
from tests.producer.commands import Ended, Run
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

UNUSED = "queue 'nope' has had no job or worker on this server"
NOBODY = "0.default.nobody"


class TestGivenAQueueThatHasNeverBeenUsed:
    @pytest.mark.parametrize("command", ["show", "resume", "purge --yes"])
    def test_when_it_must_be_known_then_it_is_not_found(self, run: Run, command: str, redis_client: Any) -> None:
        ended = run("queues", *command.split(), "--queue", "nope")

        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"producer: {UNUSED}: its name or the server is wrong.")
        assert redis_client.keys("{nope*") == []

    @pytest.mark.parametrize(
        ("command", "done"),
        [("pause", "is paused"), ("set --mode fair", "has new settings: mode fair")],
    )
    def test_when_it_is_prepared_then_that_is_done_and_noted(self, run: Run, command: str, done: str) -> None:
        ended = run("queues", *command.split(), "--queue", "nope")

        assert ended == Ended(0, f"queue 'nope' {done}\n", f"{UNUSED} yet\n")

    def test_when_it_was_prepared_then_it_can_be_shown_and_resumed(self, run: Run) -> None:
        run("queues", "pause", "--queue", "nope")

        assert run("queues", "show", "--queue", "nope").code == 0
        assert run("queues", "resume", "--queue", "nope").out == "queue 'nope' is resumed\n"

    def test_when_the_workers_it_needs_are_asked_for_then_none_is_the_answer(self, run: Run) -> None:
        assert json.loads(run("queues", "scale", "--queue", "nope", "--json").output())["wanted_workers"] == 0


class TestGivenAQueueWithAJob:
    @pytest.mark.parametrize(
        ("command", "done"),
        [
            ("pause", "is paused"),
            ("resume", "is resumed"),
            ("set --max-failures 2 --weight acme=2", "has new settings: weight acme=2, max-failures 2"),
            ("set --max-running lim=none", "has new settings: max-running lim=none"),
            ("set --tokens-per-minute lim=1500000", "has new settings: tokens-per-minute lim=1500000"),
        ],
    )
    def test_when_it_is_changed_then_that_is_printed(
        self, run: Run, producer: Producer, command: str, done: str
    ) -> None:
        producer.submit("hello")

        assert run("queues", *command.split()) == Ended(0, f"queue 'default' {done}\n", "")


class TestGivenAWorkerWithoutJobs:
    def test_when_its_queue_is_shown_then_it_is_known(self, run: Run, producer: Producer) -> None:
        producer.configure(QueueSettings(partitions=1))

        assert run("queues", "show").code == 0

    def test_when_its_queue_is_shown_then_it_is_a_row_of_a_table(self, run: Run, redis_client: Any) -> None:
        about = {"model": "small", "host": "h1", "pid": "7", "recent": "1,2,3"}
        told = beat(
            QueueKeys("default"), Beat(incarnation="w1", held=(), processed_pull=0, expiry_ms=60_000, about=about)
        )
        execute(redis_client, told)

        shown = run("queues", "show").output()

        assert "\nw1\t-\th1\t7\t?\tsmall\t?\t?\t0\t0\t0\t0\n" in shown
        assert "recent" not in shown


class TestGivenABatchWithoutJobs:
    @pytest.mark.parametrize(
        "command",
        ["batches show", "batches close", "batches expire --in 60s", "cancel --batch", "follow", "jobs list --batch"],
    )
    def test_when_it_is_named_then_it_is_not_found(self, run: Run, command: str) -> None:
        ended = run(*command.split(), "nope")

        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith("producer: batch nope has no jobs in this queue")


class TestGivenJobsThatCannotBeRequeued:
    def test_when_they_are_then_each_has_its_reason(
        self, run: Run, producer: Producer, worker: HandWorker, redis_client: Any
    ) -> None:
        failed, running = producer.submit("a").id, producer.submit("b").id
        leased, _ = worker.pull()
        worker.say(leased, [], "", end=JobState.FAILED, error="broken", code="broken")
        redis_client.delete(worker.keys.payload(failed))

        ended = run("requeue", failed, running, NOBODY)

        assert ended.code == 1
        assert [line.split("\t")[1] for line in ended.out.splitlines()] == [
            "not requeued: its prompt has expired, or a newer job has its idempotency key",
            "not requeued: it is running, not failed",
            "unknown",
        ]


class TestGivenAJobThatNobodyKnows:
    @pytest.mark.parametrize("command", ["cancel", "requeue", "delete"])
    def test_when_it_is_named_then_it_is_unknown_and_the_command_fails(
        self, run: Run, command: str, sqlite_url: str
    ) -> None:
        ended = run(command, NOBODY, *(("--database-url", sqlite_url) if command == "delete" else ()))

        assert ended == Ended(1, f"{NOBODY}\tunknown\n", "")


class TestGivenAQueueOfFourPartitions:
    @pytest.fixture(autouse=True)
    def partitioned(self, valkey: RedisServer) -> None:
        with Producer(valkey.url, partitions=4) as owner:
            owner.configure(QueueSettings(partitions=4))
            list(owner.submit_many(["hello"] * 24, batch="b"))

    def test_when_no_number_is_given_then_commands_mean_all_of_them(self, run: Run) -> None:
        assert run("queues", "pause").code == 0

        shown = json.loads(run("queues", "show", "--json").output())
        batch = json.loads(run("batches", "show", "b", "--json").output())
        cancelled = run("cancel", "--batch", "b")

        assert [part["is_paused"] for part in shown["partitions"]] == [True] * 4
        assert batch["total"] == 24
        assert cancelled.out == "24 jobs cancelled, 0 asked to stop\n"

    @pytest.mark.parametrize("command", ["queues pause", "batches show b", "follow b", "cancel --batch b", "ask hi"])
    def test_when_another_is_given_then_it_is_misuse(self, run: Run, command: str) -> None:
        ended = run(*command.split(), "--partitions", "2")

        assert (ended.code, ended.out) == (2, "")
        assert "serve 4 partitions, and this client was made for 2: leave out `partitions`" in ended.err
