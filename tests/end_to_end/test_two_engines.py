"""Two worker processes of one queue, one with an engine of another distribution, and the gateway before them."""

from collections.abc import Generator
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.producer import Producer
from sluice.producer.errors import JobFailed
from sluice.protocol.sampling import FEATURES
from sluice.version import installed_version
from sluice.worker.cli import main
from tests.end_to_end.processes import WorkerPool, WorkerProcess, worker_pool
from tests.gateway.gateway_process import gateway_process
from tests.other_engine import install
from tests.servers import RedisServer

FEATURES_SHOWN = ", ".join(feature for feature in FEATURES if feature != "tools")
"""Those of the null model, whose template has no format of calls."""

OTHER, OWN = f"other {installed_version()}", f"sluice {installed_version()}"


@pytest.fixture
def workers(valkey: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[WorkerPool]:
    install(tmp_path, monkeypatch)
    with worker_pool(valkey.url, tmp_path, WorkerProcess) as made:
        yield made


class TestGivenAnEngineThatRefusesAnOption:
    def test_when_a_worker_of_ours_joins_then_jobs_with_it_run_there_and_all_places_show_both(
        self, workers: WorkerPool, valkey: RedisServer
    ) -> None:
        workers.start(ENGINE="other").wait_until_started()
        with Producer(valkey.url) as producer:
            with pytest.raises(JobFailed, match=f"the engine {OTHER} refuses min_p: it has none"):
                producer.result(producer.submit("hi", min_p=0.1, max_tokens=2), timeout_s=30)
            workers.start().wait_until_started()
            jobs = [producer.submit(f"hi {number}", min_p=0.1, max_tokens=2) for number in range(8)]
            assert all(producer.result(job, timeout_s=30).text for job in jobs)

        with gateway_process(valkey.url) as gateway:
            (model,) = gateway.get("/v1/models").json()["data"]
            page = gateway.get("/ui/").text
        status = CliRunner().invoke(main, ["status", "--redis-url", valkey.url]).output
        assert [(engine["name"], engine["refused"]) for engine in model["engines"]] == [(OTHER, ["min_p"]), (OWN, [])]
        assert {engine["exactness"] for engine in model["engines"]} == {"bitwise"}
        assert f"engine {OTHER}: resumes bitwise; has {FEATURES_SHOWN}; refuses min_p" in status
        assert f"engine {OWN}: resumes bitwise; has {FEATURES_SHOWN}" in status
        assert OTHER in page
        assert "refuses min_p" in page
