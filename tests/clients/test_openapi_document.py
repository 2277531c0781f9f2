"""Random requests from the OpenAPI document: no answer is a 5xx, each has a status and a form that it names."""

import json
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.environments import HERE, python_in
from tests.end_to_end.processes import worker_pool
from tests.gateway.batches.processes import ENDPOINT, numbered, place_in
from tests.gateway.gateway_process import GatewayProcess
from tests.servers import redis_server

pytestmark = [pytest.mark.long, pytest.mark.clients]

NUM_CASES = 5_000
EXAMPLES = 120
"""Of each operation, at most; its edge cases come on top."""

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    """A gateway that keeps everything, with a worker that is as fast as it can be."""
    folder = tmp_path_factory.mktemp("busy")
    with redis_server("valkey") as server, worker_pool(server.url, folder) as pool:
        place = place_in(folder, server.url)
        pool.start_all(1, MODEL="null?step_s=0", RECORDER="true", DATABASE_URL=place.database_url)
        with place.callbacks(), place.gateway() as made:
            yield made


def known_ids(gateway: GatewayProcess) -> dict[str, list[Any]]:
    """Make what requests can name, and values that they can have."""
    with gateway.client() as client, gateway.http() as http:
        files = [client.files.create(file=("a", numbered(3)), purpose="batch").id for _ in range(20)]
        return {
            # One of the model's names, and few tokens: else most requests for text are refused, or take long.
            "model": ["null"],
            "max_tokens": [1, 5],
            "max_completion_tokens": [5],
            "max_output_tokens": [5],
            "n": [1, 2],
            "stream_options": [None],
            "previous_response_id": [None],
            "file_id": files,
            "input_file_id": files,
            "batch_id": [_batch(client, file).id for file in files[:5]],
            "response_id": [_response(client).id for _ in range(20)],
            "job_id": [http.post("/jobs", json={"prompt": "a", "max_tokens": 3}).json()["id"] for _ in range(20)],
            "queue": ["default"],
        }


def _batch(client: openai.OpenAI, file: str) -> Any:
    return client.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")


def _response(client: openai.OpenAI) -> Any:
    return client.responses.create(model="null", input="a", max_output_tokens=5, background=True)


class TestGivenTheDocumentThatAGatewayServes:
    @pytest.mark.parametrize("seed", [1])
    def test_when_requests_are_drawn_from_it_then_answers_are_as_it_says(
        self, busy: GatewayProcess, tmp_path: Path, seed: int
    ) -> None:
        base = busy.url.removesuffix("/v1")
        (tmp_path / "known.json").write_text(json.dumps(known_ids(busy)))
        command = [
            *(str(python_in("schemathesis").with_name("st")), "run", f"{base}/openapi.json", "--url", base),
            *("--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)),
            *("--seed", str(seed), "--continue-on-failure", "--request-timeout", "120", "--no-color"),
            *(
                "--suppress-health-check",
                "all",
                "--report",
                "json",
                "--report-json-path",
                str(tmp_path / "report.json"),
            ),
        ]
        environ = {
            "KNOWN_IDS": str(tmp_path / "known.json"),
            "SCHEMATHESIS_HOOKS": "hooks",
            "PYTHONPATH": str(HERE / "schemathesis"),
        }

        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)

        report = json.loads((tmp_path / "report.json").read_text())
        assert done.returncode == 0, done.stdout[-20_000:]
        assert report["test_cases"]["generated"] >= NUM_CASES
        assert "Traceback" not in busy.log.read_text()
