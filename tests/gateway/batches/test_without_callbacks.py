"""No `worker callbacks` runs: the batch, readiness and the log say so. The default service brings one along."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from sluice.gateway.files.hosts import mark_callbacks
from sluice.producer import Producer
from tests.end_to_end.processes import ROOT
from tests.gateway.batches.processes import ENDPOINT, Place, chat_line, encoded, kill_all, lines_of, place_in, until
from tests.gateway.gateway_process import GatewayProcess
from tests.servers import RedisServer, binary_of, how_to_get

MISSING = "no `worker callbacks` has served queue 'default'"


@pytest.fixture
def place(valkey: RedisServer, tmp_path: Path) -> Place:
    """A queue that nobody serves."""
    return place_in(tmp_path, valkey.url)


@pytest.fixture
def gateway(place: Place) -> Generator[GatewayProcess]:
    """Its gateway."""
    with place.gateway() as made:
        yield made


class TestGivenAGatewayAlone:
    def test_when_a_batch_is_created_then_all_say_what_is_missing(self, place: Place, gateway: GatewayProcess) -> None:
        with gateway.client() as client:
            file = client.files.create(file=("in.jsonl", encoded([chat_line("c-1")])), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
            found = client.batches.retrieve(batch.id)
            ready = gateway.get("/readyz")
            with Producer(place.redis_url) as producer:
                producer.run(mark_callbacks("default"))
            served = client.batches.retrieve(batch.id)

        for answer in (batch, found):
            assert MISSING in answer.to_dict()["warning"]  # pyright: ignore[reportOperatorIssue]  # it is text
        assert ready.status_code == 200
        assert MISSING in ready.json()["warnings"][0]
        assert MISSING in gateway.log.read_text()
        assert "warning" not in served.to_dict()
        assert gateway.get("/readyz").json() == {"status": "ok"}


@pytest.fixture
def default_service(tmp_path: Path) -> Generator[str]:
    """The README's two commands without settings, but for the model; the base URL of the gateway."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    environ |= {"SLUICE_STATE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "SLUICE_LOG_FORMAT": "json"}
    commands = (
        ("worker", "start", "--model", "null", "--no-metrics", "callbacks started"),
        ("producer", "serve", "--port", "0", r"on (http\S+)"),
    )
    found = ""
    with ExitStack() as stack:
        for package, *rest, words in commands:
            log = tmp_path / f"{package}.log"
            stream = stack.enter_context(log.open("wb"))
            command = [sys.executable, "-P", "-m", f"sluice.{package}", *rest]
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, env=environ, stdout=stream, stderr=stream)
            )
            stack.callback(kill_all, process)
            found = wait_for(log, words, process)
        yield found


def wait_for(log: Path, words: str, process: "subprocess.Popen[bytes]") -> str:
    """Wait until a log has some words; return what is in their last parentheses."""
    deadline_s = time.monotonic() + 60
    while (found := re.search(words, log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.01)
    return found[found.lastindex or 0]


@pytest.mark.slow
@pytest.mark.skipif(binary_of("valkey") is None, reason=how_to_get("valkey"))
class TestGivenTheDefaultService:
    @pytest.mark.long
    def test_when_the_stock_client_creates_a_batch_then_it_is_completed(self, default_service: str) -> None:
        with openai.OpenAI(base_url=default_service, api_key="none", timeout=60) as client:
            file = client.files.create(file=("in.jsonl", encoded([chat_line("c-1")])), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
            ended = until(client, batch)

            assert ended.status == "completed"
            assert [line["custom_id"] for line in lines_of(client, ended.output_file_id)] == ["c-1"]
