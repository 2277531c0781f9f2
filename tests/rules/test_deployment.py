"""Deployment files use only commands and settings that exist: compose.yaml, the Dockerfile, the systemd units."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from sluice.worker.cli import main
from sluice.worker.config import load_config

ROOT = Path(__file__).parent.parent.parent
UNITS = sorted((ROOT / "deploy").glob("*.service"))
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# Any: YAML is untyped.
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
OURS = sorted(name for name, service in SERVICES.items() if "build" in service)


def name_of(path: Path) -> str:
    """For the test's id."""
    return path.name


def parsed(command: list[str]) -> dict[str, Any]:
    """The options that `worker` reads from a command line; nothing is run.

    Raises:
        click.UsageError: `worker` would refuse it.
    """
    program, name, *arguments = command
    assert Path(program).name == "worker"
    with main.commands[name].make_context(name, arguments) as context:
        return context.params


def filled(text: str) -> str:
    """As compose fills it where the variable is not set: `${NAME:-default}`."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def environment_of(service: str) -> dict[str, str]:
    """The service's environment, variables filled."""
    return {name: filled(str(value)) for name, value in SERVICES[service]["environment"].items()}


def values_of(unit: Path, key: str) -> list[str]:
    """Every value of a key in a unit, as an instance for GPU 0 has it."""
    return [line.partition("=")[2].replace("%i", "0") for line in unit.read_text().splitlines() if _is(line, key)]


def _is(line: str, key: str) -> bool:
    return line.startswith(f"{key}=")


def environment_in(unit: Path) -> dict[str, str]:
    """Return the environment that the unit sets."""
    pairs = [pair for value in values_of(unit, "Environment") for pair in shlex.split(value)]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


class TestGivenComposeYaml:
    def test_when_it_is_read_then_each_program_has_a_service(self) -> None:
        commands = {SERVICES[name]["command"].split()[1] for name in OURS}

        assert commands == {"migrate", "start", "record", "callbacks"}

    @pytest.mark.parametrize("service", OURS)
    def test_when_a_service_starts_then_the_command_line_is_understood(self, service: str) -> None:
        parsed(shlex.split(filled(SERVICES[service]["command"])))

    @pytest.mark.parametrize("service", OURS)
    def test_when_a_service_starts_then_its_environment_is_understood(self, service: str) -> None:
        config = load_config(environment_of(service))

        assert config.redis.url is not None
        assert config.history.database_url is not None

    def test_when_the_worker_starts_then_its_model_is_the_mounted_or_the_given_one(self) -> None:
        worker = SERVICES["worker"]
        model = load_config(environment_of("worker")).model.path

        assert "${MODEL:-" in worker["environment"]["SLUICE_MODEL"]
        assert model in [volume.split(":")[1] for volume in worker["volumes"]]
        assert "--model" not in worker["command"]

    def test_when_metrics_are_published_then_they_are_served_beyond_loopback(self) -> None:
        metrics = load_config(environment_of("worker")).metrics
        published = [port.split(":") for port in SERVICES["worker"]["ports"]]

        assert published == [["127.0.0.1", "9400", str(metrics.port)]]
        assert metrics.host == "0.0.0.0"

    def test_when_a_service_waits_for_another_then_that_one_is_there(self) -> None:
        needed = {name for service in SERVICES.values() for name in service.get("depends_on", {})}

        assert needed <= SERVICES.keys()


class TestGivenTheDockerfile:
    def test_when_the_image_is_built_then_what_it_copies_is_there(self) -> None:
        copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]

        sources = [source for line in copied for source in line]

        assert {"pyproject.toml", "engine", "kernels", "migrations", "producer", "worker"} <= set(sources)
        assert [source for source in sources if not (ROOT / source).exists()] == []

    def test_when_the_image_is_run_then_its_command_is_understood(self) -> None:
        (command,) = re.findall(r"^CMD (.*)$", DOCKERFILE, flags=re.MULTILINE)

        assert parsed(json.loads(command))["gpu"] == "cuda:0"


class TestGivenTheUnits:
    @pytest.mark.parametrize("unit", UNITS, ids=name_of)
    def test_when_a_unit_starts_then_its_command_line_is_understood(self, unit: Path) -> None:
        (command,) = values_of(unit, "ExecStart")

        parsed(shlex.split(command))

    @pytest.mark.parametrize("unit", UNITS, ids=name_of)
    def test_when_a_unit_starts_then_its_environment_is_understood(self, unit: Path) -> None:
        load_config(environment_in(unit))

    @pytest.mark.parametrize("unit", UNITS, ids=name_of)
    def test_when_homes_are_hidden_then_all_that_is_written_lies_in_the_state_folder(self, unit: Path) -> None:
        (state,) = values_of(unit, "StateDirectory")
        folders = {name: value for name, value in environment_in(unit).items() if value.startswith("/")}

        assert values_of(unit, "ProtectHome") == ["yes"]
        assert {"HOME", "SLUICE_STATE_DIR"} <= folders.keys()
        assert [f for f in folders.values() if not Path(f).is_relative_to(f"/var/lib/{state}")] == []

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
    @pytest.mark.parametrize("unit", UNITS, ids=name_of)
    def test_when_systemd_reads_a_unit_then_it_finds_nothing_wrong(self, unit: Path, tmp_path: Path) -> None:
        (command,) = values_of(unit, "ExecStart")
        # systemd-analyze requires the program to exist; the rest of the unit is unchanged.
        here = tmp_path / unit.name
        here.write_text(unit.read_text().replace(shlex.split(command)[0], shutil.which("true") or "/bin/true"))

        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(here)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

        assert (done.returncode, done.stderr) == (0, "")


class TestGivenACommandLineThatWorkerRefuses:
    """So that the tests above can fail."""

    @pytest.mark.parametrize("command", ["worker start --modle x", "worker record extra", "worker start --gpu one"])
    def test_when_it_is_parsed_then_it_is_a_misuse(self, command: str) -> None:
        with pytest.raises(click.UsageError):
            parsed(shlex.split(command))
