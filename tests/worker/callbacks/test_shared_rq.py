"""Several `worker callbacks` share rq's Redis: none runs what another one has enqueued."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.gateway.openai.responses import ResponseInfo
from sluice.gateway.responses.store import ResponseStore, StoredResponse
from sluice.gateway.tables.database import Database
from sluice.history.database import open_database
from sluice.history.tables import jobs
from sluice.protocol.clock import wall_ms
from sluice.protocol.wire import JobId
from sluice.worker.callbacks.chore_jobs import rq_queue
from sluice.worker.callbacks.gateway_tasks import bind
from sluice.worker.callbacks.mover import Mover
from sluice.worker.callbacks.settings import CallbackSettings
from sluice.worker.connection.clients import Client
from sluice.worker.recorder.migrate import migrate
from tests.history.test_recorder import client_of
from tests.history.test_retention import DAY_MS, ran
from tests.history.test_rows import write
from tests.servers import RedisServer, redis_server
from tests.worker.callbacks.receiver import receiver
from tests.worker.callbacks.test_callbacks import chores_of, complete_batch, end_job, settings_for, work


def run_all(client: Client, settings: CallbackSettings) -> None:
    """Do what a whole `worker callbacks` would do now."""
    Mover(client, client, settings).drain()
    bind(settings)
    for name in (settings.rq_names.chores, settings.rq_names.gateway, settings.rq_names.webhooks):
        work(client, settings, rq_queue(name, client))


def queues_left(engine: Engine) -> Sequence[str]:
    """The queues of the rows in the history."""
    with engine.connect() as connection:
        return connection.execute(sa.select(jobs.c.queue).order_by(jobs.c.queue)).scalars().all()


class TestGivenTwoEnvironments:
    """They have queues and databases of their own. Only one has a retention."""

    def test_when_the_other_is_free_first_then_its_rows_stay(self, valkey: RedisServer, tmp_path: Path) -> None:
        client = client_of(valkey)
        settings, engines = dict[str, CallbackSettings](), dict[str, Engine]()
        for queue, days in (("staging", 1.0), ("prod", None)):
            url = f"sqlite:///{tmp_path}/{queue}.db"
            settings[queue] = settings_for(valkey, url, queue=queue, retention_days=days)
            engines[queue] = open_database(url, is_writer=True)
            migrate(engines[queue])
            write(engines[queue], ran("0.a.1", wall_ms() - 30 * DAY_MS), queue=queue)
        Mover(client, client, settings["staging"]).drain()

        run_all(client, settings["prod"])
        kept = queues_left(engines["staging"])
        run_all(client, settings["staging"])

        assert (kept, queues_left(engines["staging"]), queues_left(engines["prod"])) == (["staging"], [], ["prod"])
        for engine in engines.values():
            engine.dispose()


class TestGivenTwoQueuesInOneDatabase:
    def test_when_one_has_a_retention_then_the_rows_of_the_other_stay(
        self, valkey: RedisServer, sqlite_url: str, sqlite_history: Engine
    ) -> None:
        for queue in ("bulk", "chat"):
            write(sqlite_history, ran(f"0.a.{queue}", wall_ms() - 30 * DAY_MS), queue=queue)
        settings = settings_for(valkey, sqlite_url, queue="bulk", retention_days=1.0, prompt_retention_days=1.0)

        run_all(client_of(valkey), settings)

        assert queues_left(sqlite_history) == ["chat"]
        with sqlite_history.connect() as connection:
            assert connection.execute(sa.select(jobs.c.prompt)).scalars().all() == ["secret"]

    def test_when_the_other_is_on_another_server_then_its_responses_stay_open(
        self, valkey: RedisServer, sqlite_url: str, tmp_path: Path
    ) -> None:
        info = ResponseInfo(job_id=JobId("0.acme.waits"), created_ms=1, model="null", options={}, is_background=True)
        row = StoredResponse(info=info, tenant="acme", queue="chat", expires_ms=wall_ms() + 60_000)
        settings = settings_for(valkey, sqlite_url, queue="bulk", files_url=tmp_path.as_uri())
        with Database(sqlite_url) as database:
            ResponseStore(database).add(row)

            run_all(client_of(valkey), settings)

            found = ResponseStore(database).get(info.id, "acme")
        assert found is not None
        assert found.end is None


class TestGivenQueuesOfOneNameOnTwoServers:
    """Their rq is a third one. Each has other keys for webhooks."""

    def test_when_the_other_is_free_first_then_it_sends_nothing(self, valkey: RedisServer) -> None:
        with redis_server() as other, receiver() as hook:
            shared = {"rq_url": "redis://rq/0"}
            ours = settings_for(valkey, secret="ours", **shared)
            theirs = settings_for(other, secret="theirs", **shared)
            client = client_of(valkey)
            end_job(client, hook.url)
            Mover(client, client, ours).drain()

            work(client, theirs)
            assert hook.got == []
            work(client, ours)

            assert len(hook.got) == 1


class TestGivenTwoExportFolders:
    def test_when_the_other_is_free_first_then_the_export_waits_for_its_own(
        self, valkey: RedisServer, sqlite_url: str, tmp_path: Path
    ) -> None:
        client = client_of(valkey)
        ours, theirs = (settings_for(valkey, sqlite_url, export_folder=str(tmp_path / name)) for name in ("a", "b"))
        complete_batch(client, "")
        Mover(client, client, ours).drain()

        work(client, theirs, chores_of(theirs, client))

        assert chores_of(ours, client).count == 1
        assert chores_of(ours, client).failed_job_registry.count == 0


class TestGivenSettingsThatNameTheSamePlaces:
    @pytest.mark.parametrize(
        "changes",
        [
            {"database_url": "postgresql://new:pass@db/x", "secret": "another", "retention_days": 5.0},
            {"redis_url": "redis://u:p@other:1/0", "rq_url": "redis://u:p@other:1/0"},
        ],
    )
    def test_when_a_password_or_an_address_changes_then_what_waits_is_found(
        self, valkey: RedisServer, changes: Mapping[str, Any]
    ) -> None:
        before = settings_for(valkey, "postgresql://old:word@db/x")

        after = settings_for(valkey, **{"database_url": "postgresql://db/x"} | dict(changes))

        assert after.rq_names == before.rq_names
