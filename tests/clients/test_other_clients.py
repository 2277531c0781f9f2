"""Programs of others in front of a gateway: LangChain, LiteLLM's proxy, the load generator of vLLM."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from secrets import token_hex

import httpx
import pytest

from tests.clients.environments import HERE, Client, python_client, python_in
from tests.end_to_end.processes import ROOT
from tests.gateway.gateway_process import GatewayProcess

START_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.clients]


class TestGivenLangchain:
    def test_when_it_chats_then_streams_and_batches_are_the_whole_answers(self, keeping: GatewayProcess) -> None:
        [said] = python_client("langchain").using(keeping.url).run()

        assert said["text"] == said["streamed"] == said["awaited"] != ""
        assert said["several"] == [said["text"]] * 2
        assert (said["finish_reason"], said["usage"], said["streamed_usage"]) == ("length", 20, 20)
        assert all(said[name] for name in ("response", "continued", "streamed_response"))


@pytest.fixture(scope="module")
def proxied(keeping: GatewayProcess, tmp_path_factory: pytest.TempPathFactory) -> Generator[Client]:
    """OpenAI's client, of a proxy in front of the gateway."""
    command, key = python_in("litellm").with_name("litellm"), f"sk-{token_hex(16)}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environ = {**os.environ, "GATEWAY_URL": keeping.url, "LITELLM_MASTER_KEY": key}
    arguments = ["--config", str(HERE / "litellm" / "proxy.yaml"), "--host", "127.0.0.1", "--port", port]
    log = tmp_path_factory.mktemp("litellm") / "proxy.log"
    with (
        log.open("wb") as output,
        subprocess.Popen([command, *arguments], cwd=log.parent, env=environ, stdout=output, stderr=output) as proxy,
    ):
        try:
            _wait_until_alive(f"http://127.0.0.1:{port}/health/liveliness", proxy, log)
            url = f"http://127.0.0.1:{port}/v1"
            yield python_client("openai_python").using(url, OPENAI_API_KEY=key)
        finally:
            proxy.kill()


class TestGivenLitellm:
    def test_when_a_chat_goes_through_it_then_streams_are_the_whole_answers(self, proxied: Client) -> None:
        [said] = proxied.run("chat")

        assert said["texts"] == said["streamed"]
        assert said["in_parts"] == said["texts"][0]
        assert (said["finish_reasons"], said["usage"], said["streamed_usage"]) == (["length", "length"], 40, 40)

    def test_when_a_text_goes_through_it_then_the_stream_is_the_whole_answer(self, proxied: Client) -> None:
        [said] = proxied.run("completion")

        assert said["text"] == said["streamed"] != ""

    def test_when_several_go_through_it_then_each_has_its_own_answer(self, proxied: Client) -> None:
        [said] = proxied.run("several")

        assert said["equal"] == [True] * 8

    def test_when_responses_go_through_it_then_each_way_to_read_one_is_the_same(self, proxied: Client) -> None:
        [said] = proxied.run("responses")

        # The proxy writes ids of its own, so they differ.
        differing = {"previous", "text", "helped"}
        assert {name: value for name, value in said.items() if name not in differing} == {
            "retrieved": True, "streamed": True, "items": ["go on"], "usage": 20, "cancelled": "cancelled",
            "deleted": 404,
        }  # fmt: skip

    def test_when_the_gateway_refuses_then_the_client_is_told_so(self, proxied: Client) -> None:
        said = proxied.run("refused")

        assert [(line["kind"], line["param"]) for line in said[2:]] == [
            ("BadRequestError", "colour"),
            ("BadRequestError", "messages"),
        ]


def _wait_until_alive(url: str, proxy: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        assert proxy.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)


class TestGivenTheLoadGeneratorOfVllm:
    @pytest.mark.parametrize(
        ("backend", "path"),
        [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions"), ("openai-responses", "/v1/responses")],
    )
    def test_when_it_measures_then_every_request_is_answered_in_full(
        self, keeping: GatewayProcess, tmp_path: Path, backend: str, path: str
    ) -> None:
        load = {"dataset-name": "random", "num-prompts": 40, "random-input-len": 32, "random-output-len": 48}
        asked = {"backend": backend, "base-url": keeping.url.removesuffix("/v1"), "endpoint": path, "model": "null"}
        # The null model has a tokenizer of its own; this one only makes prompts.
        asked |= {"tokenizer": ROOT / "worker" / "small_model", "max-concurrency": 16, "result-dir": tmp_path}
        options = [f"--{name}={value}" for name, value in {**load, **asked, "result-filename": "found.json"}.items()]

        with python_client("vllm_bench").using(keeping.url).started(*options, "--ignore-eos", "--save-result") as run:
            output, _ = run.communicate(timeout=START_S)

        assert run.returncode == 0, output
        found = json.loads((tmp_path / "found.json").read_text())
        assert (found["completed"], found["failed"], found["total_output_tokens"]) == (40, 0, 40 * 48)
        assert 0 < found["mean_ttft_ms"] < found["duration"] * 1000
        assert found["mean_tpot_ms"] > 0
