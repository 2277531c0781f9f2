"""The gateway's settings: flags, the environment and a file, as the worker's."""

from pathlib import Path

import pytest

from sluice.gateway.settings import DECLARED, SETTINGS
from sluice.worker.config import SETTINGS as OF_WORKER
from sluice.worker.config import load_config

FILE = """
[gateway]
port = 9000
cors_origins = ["https://a.example", "https://b.example"]
request_limit_s = "10m"
[queue]
reserve_tokens = 7
"""


class TestGivenASettingInSeveralPlaces:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "sluice.toml"
        path.write_text(FILE)
        return path

    def test_when_they_are_read_then_the_later_source_wins(self, file: Path) -> None:
        environ = {
            "SLUICE_CONFIG": str(file),
            "SLUICE_GATEWAY_PORT": "9001",
            "SLUICE_GATEWAY_CORS_ORIGIN": "https://c.example https://d.example",
            "SLUICE_GATEWAY_DRAIN_LIMIT_S": "2m",
        }

        given = DECLARED.read(environ, flags={"gateway.port": "9002"})

        assert given.problems == []
        assert given.of("gateway") == {
            "port": 9002,
            "cors_origins": ("https://c.example", "https://d.example"),
            "request_limit_s": 600.0,
            "drain_s": 120.0,
        }

    def test_when_worker_and_gateway_read_the_same_then_each_leaves_the_other_s_alone(self, file: Path) -> None:
        environ = {"SLUICE_GATEWAY_PORT": "9001", "SLUICE_RESERVE_TOKENS": "8", "SLUICE_LOG_LEVEL": "debug"}

        config, given = load_config(environ, file=file), DECLARED.read(environ, file=file)

        assert (config.queue.reserve_tokens, config.log.level) == (8, "debug")
        assert (given.problems, given.values["gateway.log_level"]) == ([], "debug")


class TestGivenSettingsThatAreWrong:
    def test_when_they_are_read_then_each_is_named_as_it_was_given(self, tmp_path: Path) -> None:
        file = tmp_path / "sluice.toml"
        file.write_text("[gateway]\nprot = 1\nmax_connections = 'many'\n")
        environ = {"SLUICE_GATEWAY_PROT": "1", "SLUICE_GATEWAY_DRAIN_LIMIT_S": "soon", "SLUICE_LOG_LEVEL": "loud"}

        given = DECLARED.read(environ, file=file, flags={"gateway.port": "x"})

        assert sorted(given.problems) == [
            "--port: expected port as a whole number, got 'x'",
            f"{file}: gateway.max_connections: expected count as a whole number, got 'many'",
            f"{file}: gateway.prot: unknown setting",
            "SLUICE_GATEWAY_DRAIN_LIMIT_S: expected a time such as 90d, 12h, 30m, 45s or 45, got 'soon'",
            "SLUICE_GATEWAY_PROT: unknown setting; `producer serve --help` lists all",
            "SLUICE_LOG_LEVEL: expected one of debug, info, warning, error, got 'loud'",
        ]

    def test_when_kubernetes_names_its_service_then_that_is_no_setting(self) -> None:
        given = DECLARED.read({"SLUICE_GATEWAY_PORT": "tcp://10.96.12.7:8000"})

        assert (given.problems, given.values) == ([], {})


def test_when_worker_and_gateway_have_the_same_name_then_it_is_the_same_setting() -> None:
    shared = {one.env_name for one in SETTINGS} & {one.env_name for one in OF_WORKER}

    assert shared == {"SLUICE_FILES_URL", "SLUICE_LOG_LEVEL", "SLUICE_LOG_FORMAT"}
