"""Workers and gateways that are killed while OpenAI's clients read from them."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from sluice.producer import Producer
from tests.clients.environments import Client, Facts
from tests.end_to_end.processes import ROOT, worker_pool
from tests.gateway.batches.processes import place_in
from tests.gateway.gateway_process import gateway_process
from tests.servers import RedisServer

KILLED_AFTER = 10
"""Chunks that a client has read when a process is killed."""

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.clients]


def lines_of(process: subprocess.Popen[str]) -> Iterator[Facts]:
    """What a client says."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def read_and_kill(client: Client, kill: Callable[[], None], what: str = "stream") -> list[Facts]:
    """Stream a chat or a response, and kill something amid it."""
    said: list[Facts] = []
    with client.started(what) as process:
        for line in lines_of(process):
            said.append(line)
            if len(said) == KILLED_AFTER:
                kill()
    return said


def wait_until_running(producer: Producer) -> None:
    """Wait until a worker has a job."""
    deadline_s = time.monotonic() + 20
    while not producer.queue()[0].running_jobs:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class TestGivenTwoWorkers:
    @pytest.mark.parametrize("what", ["stream", "background"])
    @pytest.mark.parametrize(
        ("model", "path", "tokens"),
        [("null", "null?step_s=0.01", "200"), ("small_model", str(ROOT / "worker" / "small_model"), "1500")],
        ids=["null", "small"],
    )
    def test_when_the_one_that_streams_is_killed_then_each_character_comes_once(
        self, openai_client: Client, valkey: RedisServer, tmp_path: Path, model: str, path: str, tokens: str, what: str
    ) -> None:
        with worker_pool(valkey.url, tmp_path) as pool, place_in(tmp_path, valkey.url).gateway() as gateway:
            first, second = pool.start_all(2, MODEL=path, DEVICE="cpu")
            second.signal(signal.SIGTSTP)
            second.wait_for_line("quiet")
            client = openai_client.using(gateway.url, MODEL=model, TOKENS=tokens, PROMPT="Count from 1 to 1000.")

            def kill() -> None:
                second.signal(signal.SIGCONT)
                first.signal_worker(signal.SIGKILL)

            said = read_and_kill(client, kill, what)

            unkilled = client.run(what)
            with Producer(valkey.url) as producer:
                attempts = [producer.status(job_of(one)).attempt for one in (said, unkilled)]
        assert said[-1]["end"] in ("clean", "response.incomplete", "response.completed")
        assert attempts == [2, 1]
        assert text_of(said) == text_of(unkilled)


class TestGivenAGatewayThatIsKilled:
    def test_when_a_chat_is_streamed_then_the_client_raises(
        self, openai_client: Client, valkey: RedisServer, tmp_path: Path
    ) -> None:
        with worker_pool(valkey.url, tmp_path) as pool, gateway_process(valkey.url) as gateway:
            pool.start_all(1)

            said = read_and_kill(openai_client.using(gateway.url, TOKENS="1000"), gateway.process.kill)

        assert said[-1]["end"] == "raised"

    def test_when_a_background_response_is_streamed_then_it_is_rejoined_at_another(
        self, openai_client: Client, valkey: RedisServer, tmp_path: Path
    ) -> None:
        place = place_in(tmp_path, valkey.url)
        with worker_pool(valkey.url, tmp_path) as pool, place.gateway() as killed, place.gateway() as other:
            pool.start_all(1)

            said = read_and_kill(openai_client.using(killed.url, TOKENS="200"), killed.process.kill, "background")
            *_, last, end = said
            client = openai_client.using(other.url, TOKENS="200", ID=said[0]["id"], AFTER=str(last["after"]))
            rest = client.run("rejoined")
            unkilled = client.run("background")

        assert end["end"] == "raised"
        assert len(rest) > 2, "it had ended before the gateway was killed"
        assert text_of(said) + text_of(rest) == rest[-1]["text"] == text_of(unkilled)

    def test_when_the_client_tries_again_with_its_key_then_it_reads_the_same_job(
        self, openai_client: Client, valkey: RedisServer, tmp_path: Path
    ) -> None:
        with worker_pool(valkey.url, tmp_path) as pool, Producer(valkey.url) as producer:
            pool.start_all(1)
            with gateway_process(valkey.url) as killed:
                port = killed.url.removesuffix("/v1").rpartition(":")[2]
                client = openai_client.using(killed.url, TOKENS="200", KEY=uuid4().hex)
                with client.started("whole") as process:
                    said = lines_of(process)
                    next(said)
                    wait_until_running(producer)
                    killed.process.kill()
                    killed.process.wait()
                    with gateway_process(valkey.url, "--port", port):
                        answer = next(said)

            assert producer.result(answer["id"].removeprefix("chatcmpl-")).text == answer["text"]
            assert producer.queue()[0].totals["done"] == 1


def job_of(said: list[Facts]) -> str:
    """The job of a stream."""
    name = said[0]["id"].removeprefix("chatcmpl-")
    return f"0.default.{name.removeprefix('resp_')}" if name.startswith("resp_") else name


def text_of(said: list[Facts]) -> str:
    """The text of a stream."""
    return "".join(line.get("delta", "") for line in said)
