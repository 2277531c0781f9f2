"""Jobs of adapters: readers see an adapter as a model, and only the same files of it continue a job."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from sluice.history.tables import jobs
from sluice.history.writer import HistoryWriter
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions
from sluice.worker.config import load_config
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from sluice.worker.status import living_workers, table_of
from tests.history.test_recorder import client_of
from tests.integration.jobs import (
    KEYS,
    Ask,
    num_on_channel,
    read_channel,
    result_of,
    state_of,
    submit_all,
    wait_for_ends,
    wait_until,
)
from tests.integration.workers import running_worker
from tests.oracles.adapters import save_adapter
from tests.servers import RedisServer

BASE = SMALL_MODEL.name
LONG = JobOptions(max_tokens=300, ignore_eos=True)


@pytest.fixture
def client(valkey: RedisServer) -> Generator[Any]:
    with valkey.client() as client:
        client.hset(KEYS.key("config"), "test_clock_offset_ms", 3_600_000)
        yield client


def settings_of(folder: Path, *, seed: int = 0) -> dict[str, Any]:
    """Those of a worker with an adapter "law", whose weights the seed says."""
    save_adapter(folder / "law", SMALL_MODEL, seed=seed)
    return {"model__path": str(SMALL_MODEL), "model__adapters": str(folder), "drain__mode": "hand-over"}


def leave_in_the_middle(url: str, client: Any, settings: dict[str, Any]) -> JobId:
    """A worker begins a job of the adapter, and hands it over after some tokens."""
    with running_worker(url, **settings):
        (job_id,) = submit_all(client, [Ask(model="law", options=LONG)])
        wait_until(lambda: num_on_channel(client, job_id) >= 10, "it speaks")
    assert state_of(client, job_id) is JobState.QUEUED
    return job_id


class TestGivenAWorkerWithAnAdapter:
    def test_when_jobs_of_both_are_recorded_then_the_adapter_is_a_model_with_a_fingerprint_of_its_own(
        self, valkey: RedisServer, client: Any, sqlite_history: Engine, tmp_path: Path
    ) -> None:
        with running_worker(valkey.url, **settings_of(tmp_path / "adapters")):
            asks = [Ask(model=model, options=JobOptions(max_tokens=2)) for model in ("law", BASE)]
            job_ids = submit_all(client, asks)
            wait_for_ends(client, job_ids)
            lines = table_of(living_workers(load_config({}), valkey.url), "here").splitlines()

        Recorder(client_of(valkey), HistoryWriter(sqlite_history), RecorderSettings(queues=("default",))).drain()

        assert f"model {BASE} has the adapters law" in lines
        with sqlite_history.connect() as connection:
            found = {row.id: row for row in connection.execute(sa.select(jobs))}
        rows = [found[job_id] for job_id in job_ids]
        assert [row.model for row in rows] == ["law", BASE]
        assert len({row.fingerprint for row in rows}) == 2


class TestGivenAJobOfAnAdapterThatAnotherWorkerBegan:
    def test_when_a_worker_has_the_same_files_then_it_goes_on_without_a_seam(
        self, valkey: RedisServer, client: Any, tmp_path: Path
    ) -> None:
        settings = settings_of(tmp_path / "adapters")
        job_id = leave_in_the_middle(valkey.url, client, settings)

        with running_worker(valkey.url, **settings):
            (whole,) = submit_all(client, [Ask(model="law", options=LONG)])
            wait_for_ends(client, [job_id, whole])

        assert state_of(client, job_id) is JobState.DONE
        assert result_of(client, job_id) == result_of(client, whole)

    def test_when_a_worker_has_other_files_of_that_name_then_it_is_another_model(
        self, valkey: RedisServer, client: Any, tmp_path: Path
    ) -> None:
        job_id = leave_in_the_middle(valkey.url, client, settings_of(tmp_path / "adapters"))
        others = settings_of(tmp_path / "others", seed=1)

        with running_worker(valkey.url, queue__on_model_change="fail", **others):
            wait_for_ends(client, [job_id])

        end = read_channel(client, job_id)[-1].end
        assert end is not None
        assert (end.state, end.error_code) == (JobState.FAILED, "model_changed")
