"""A job is watched while its worker is killed: the page shows every token once, and the hand-over."""

import re
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from sluice.producer import Producer
from sluice.worker.recorder.migrate import migrate
from tests.end_to_end.processes import WorkerProcess, worker_pool
from tests.gateway.gateway_process import gateway_process
from tests.gateway.ui.browser.conftest import Chromium
from tests.histories import opened_history
from tests.servers import redis_server

pytestmark = [pytest.mark.browser, pytest.mark.long]
NUM_TOKENS = 300


@pytest.fixture
def stack(tmp_path: Path) -> Generator[tuple[str, str, list[WorkerProcess]]]:
    """The page, Redis, and two workers."""
    database_url = f"sqlite:///{tmp_path}/history.db"
    with opened_history(database_url) as engine:
        migrate(engine)
    slow = {"MODEL": "null?step_s=0.03", "RECORDER": "true", "DATABASE_URL": database_url}
    with redis_server("valkey") as server, worker_pool(server.url, tmp_path) as pool:
        workers = pool.start_all(2, **slow)
        with gateway_process(server.url, database_url=database_url) as gateway:
            yield gateway.url.removesuffix("/v1"), server.url, workers


class TestGivenAJobThatIsWatched:
    def test_when_its_worker_is_killed_then_the_text_goes_on_at_the_next_token(
        self, stack: tuple[str, str, list[WorkerProcess]], chromium: Chromium
    ) -> None:
        url, redis_url, workers = stack
        with Producer(redis_url) as producer, chromium.window() as window:
            job = producer.submit("once upon a time", max_tokens=NUM_TOKENS)
            window.page.goto(f"{url}/ui/jobs/{job.id}")
            expect(window.page.locator("#choice-0")).to_have_text(re.compile(r"\S.{20}", re.DOTALL))

            owner = producer.status(job).owner or ""
            [worker] = [one for one in workers if owner.startswith(one.incarnation)]
            worker.signal_worker(signal.SIGKILL)

            expect(window.page.locator("#state .state")).to_have_text("done", timeout=60_000)
            expect(window.page.locator("#live")).to_have_text("complete", timeout=20_000)
            shown = window.page.locator("#choice-0").text_content()
            assert shown == producer.result(job, timeout_s=20).choices[0].text
            assert window.page.locator("#timeline .death").count() > 1  # one is in the key
            expect(window.page.locator("#timeline")).to_contain_text("Attempt 2")
            assert window.faults == []
