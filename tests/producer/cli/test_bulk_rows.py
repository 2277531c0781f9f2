"""The lines of a bulk file in the history, its export, the lists and webhooks: real commands on a real server."""

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.history.database import open_database
from sluice.history.export import BatchJobs, export_batch
from sluice.history.writer import HistoryWriter
from sluice.worker.callbacks.chore_jobs import rq_queue
from sluice.worker.callbacks.mover import Mover
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.connection.clients import connect
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.producer.commands import Run
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer

CHAT = "/v1/chat/completions"
HOOK = "https://example.org/hook"


@pytest.fixture
def ended(run: Run, valkey: RedisServer, tmp_path: Path, sqlite_url: str) -> str:
    """The history of a file that has run: a chat line, a blank one, and a plain one without a custom id."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [json.dumps({"custom_id": "first", "url": CHAT, "body": body}), "", '{"prompt": "second"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    run("submit", "in.jsonl", "--batch", "b", "--callback-url", HOOK).output()
    with valkey.client() as client:
        worker = HandWorker(client)
        for leased in worker.pull():
            worker.generate(leased)
    engine = open_database(sqlite_url, is_writer=True)
    client = connect(valkey.url, timeout_s=5)
    Recorder(client, HistoryWriter(engine), RecorderSettings()).drain()
    engine.dispose()
    return sqlite_url


class TestGivenABulkFileThatHasRun:
    """Its rows can be joined to its lines."""

    def test_when_its_jobs_are_listed_then_custom_ids_and_line_numbers_are_there(self, run: Run, ended: str) -> None:
        asked = ("jobs", "list", "--batch", "b", "--database-url", ended)

        listed = json.loads(run(*asked, "--json").output())
        table = run(*asked).output()

        assert {(row["custom_id"], row["line"]) for row in listed} == {("first", 1), ("line-3", 3)}
        assert {tuple(line.split("\t")[-2:]) for line in table.splitlines()} == {
            ("line", "custom_id"), ("1", "first"), ("3", "line-3"),
        }  # fmt: skip

    def test_when_one_is_shown_without_a_history_then_the_queue_knows_its_line(self, run: Run, ended: str) -> None:
        listed = json.loads(run("jobs", "list", "--database-url", ended, "--json").output())

        shown = json.loads(run("jobs", "show", listed[0]["id"], "--json").output())["queue"]

        assert (shown["custom_id"], shown["line"]) == (listed[0]["custom_id"], listed[0]["line"])

    def test_when_its_batch_is_exported_then_each_line_has_its_name_number_and_format(
        self, tmp_path: Path, ended: str
    ) -> None:
        engine = open_database(ended)

        written = export_batch(engine, BatchJobs("default", "b"), tmp_path)

        engine.dispose()
        lines: list[dict[str, Any]] = [json.loads(line) for line in written.output_path.read_text().splitlines()]
        assert {(one["custom_id"], one["line"], one["response"]["body"]["object"]) for one in lines} == {
            ("first", 1, "chat.completion"), ("line-3", 3, "text_completion"),
        }  # fmt: skip

    def test_when_its_webhooks_are_made_then_they_name_the_line(self, valkey: RedisServer, ended: str) -> None:
        settings = CallbackSettings(
            redis_url=valkey.url,
            rq_url=valkey.url,
            database_url=ended,
            queue="default",
            secret="a secret of sixteen bytes or more",
        )
        client = connect(valkey.url, timeout_s=5)

        Mover(client, client, settings).drain()

        jobs: list[Any] = rq_queue(settings.rq_names.webhooks, client).get_jobs()  # Any: rq's types have holes
        data = [json.loads(job.args[2])["data"] for job in jobs]
        assert {(one["custom_id"], one["line"]) for one in data} == {("first", 1), ("line-3", 3)}
