"""A Hugging Face name, downloaded from a server on this host: the files that make up a model, once."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = ["config.json", "tokenizer.json", "chat_template.jinja", "README.md"]
ELSEWHERE = ["onnx/model.onnx", "onnx/config.json", "original/model.safetensors", "consolidated.safetensors"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


class Hub(ThreadingHTTPServer):
    """A hub with one repository."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Repository)
        self.files = files
        self.sent: list[str] = []


class Repository(BaseHTTPRequestHandler):
    """Answers for `owner/model`."""

    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:  # as http.server calls it
        self._answer()

    def do_GET(self) -> None:  # as above
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # as above
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/model/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(body), "oid": "0" * 40} for name, body in self._files()
            ]
            self._send(json.dumps(listed).encode())
        elif path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": name} for name, _ in self._files()]
            self._send(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode())
        elif (name := path.removeprefix(f"/owner/model/resolve/{COMMIT}/")) in self.server.files:
            if self.command == "GET":
                self.server.sent.append(name)
            self._send(self.server.files[name], {"X-Repo-Commit": COMMIT})
        else:
            self.send_error(404)

    def _files(self) -> list[tuple[str, bytes]]:
        return list(self.server.files.items())

    def _send(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        about = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "Content-Length": str(len(body)), **(headers or {})}
        for name, value in about.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def files(request: pytest.FixtureRequest) -> dict[str, bytes]:
    weights: list[str] = request.param
    bodies = {name: name.encode() for name in [*SMALL, *ELSEWHERE, *weights]}
    if INDEX in bodies:
        bodies[INDEX] = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
    return bodies


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with Hub(files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def download(hub: Hub, home: Path) -> Path:
    """In a process of its own: the library reads its environment when it is imported."""
    code = "from sluice.worker.model.folders import find_folder; print(find_folder('owner/model'))"
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}", "HF_HOME": str(home)}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


class TestGivenARepositoryWithItsWeightsInSeveralForms:
    @pytest.mark.parametrize(
        ("files", "wanted"),
        [
            pytest.param([INDEX, *SHARDS, "model.safetensors"], [INDEX, *SHARDS], id="shards"),
            pytest.param(["model.safetensors"], ["model.safetensors"], id="one file", marks=pytest.mark.long),
        ],
        indirect=["files"],
    )
    def test_when_it_is_downloaded_then_each_file_of_the_model_is_fetched_once(
        self, hub: Hub, wanted: list[str], tmp_path: Path
    ) -> None:
        folder = download(hub, tmp_path)

        expected = sorted([*wanted, "config.json", "tokenizer.json", "chat_template.jinja"])
        assert sorted(path.name for path in folder.iterdir()) == expected
        assert sorted(hub.sent) == expected

    @pytest.mark.parametrize("files", [pytest.param([], id="other name", marks=pytest.mark.long)], indirect=True)
    def test_when_no_weights_have_the_usual_name_then_those_at_the_top_are_fetched(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        folder = download(hub, tmp_path)

        assert [path.name for path in folder.glob("*.safetensors")] == ["consolidated.safetensors"]
