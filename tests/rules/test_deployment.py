"""Deployment files use only commands and settings that exist: compose.yaml, the Dockerfile, the systemd units."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from prometheus_client import CollectorRegistry

from sluice.worker.callbacks import rq_workers
from sluice.worker.config import MetricsConfig, load_config
from sluice.worker.iteration_feed import IterationFeed
from sluice.worker.log import get_log
from sluice.worker.serve.metrics import MetricsServer, Readiness
from sluice.worker.stopping import FINISH_S, FLUSH_S
from tests.rules.commands import PROGRAMS, below

ROOT = Path(__file__).parent.parent.parent
UNITS = sorted((ROOT / "deploy").glob("*.service"))
DOCKERFILE = (ROOT / "Dockerfile").read_text()
GPU_VERSIONS = (ROOT / "tools" / "gpu_versions" / "requirements.txt").read_text()
# Any: YAML is untyped.
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
WORKERS = ["worker", "worker-cpu"]
OURS = sorted(name for name, service in SERVICES.items() if "build" in service)


class TestGivenTheInstalledPrograms:
    @pytest.mark.parametrize("program", ["producer", "worker"])
    def test_when_one_is_started_then_there_is_a_function_for_it(self, program: str) -> None:
        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

        assert callable(EntryPoint(program, scripts[program], "console_scripts").load())


def name_of(path: Path) -> str:
    """For the test's id."""
    return path.name


def parsed(line: list[str]) -> dict[str, Any]:
    """The options that `worker` or `producer` reads from a command line; nothing is run.

    Raises:
        click.UsageError: it would refuse it.
    """
    program, name, *arguments = line
    command = below(PROGRAMS[Path(program).name])[name]
    while isinstance(command, click.Group):
        command, arguments = below(command)[arguments[0]], arguments[1:]
    with command.make_context(name, arguments) as context:
        return context.params


def filled(text: str) -> str:
    """As compose fills it where the variable is not set: `${NAME:-default}`, and `${NAME:+…}` is nothing."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", re.sub(r"\$\{\w+:\+.*\}", "", text))


def environment_of(service: str) -> dict[str, str]:
    """The service's environment, variables filled. One without a value is passed on if it is set, and it is not."""
    given = SERVICES[service]["environment"].items()
    return {name: filled(str(value)) for name, value in given if value is not None}


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

        assert commands == {"migrate", "start", "record", "callbacks", "keys", "serve"}

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

    def test_when_a_profile_is_chosen_then_one_worker_starts_on_its_device(self) -> None:
        devices = {SERVICES[name]["profiles"][0]: parsed(filled(SERVICES[name]["command"]).split()) for name in WORKERS}

        assert [name for name in OURS if "profiles" in SERVICES[name]] == WORKERS
        assert devices["gpu"]["gpu"] == "cuda:0"
        assert (devices["cpu"]["cpu"], devices["cpu"]["gpu"]) == (True, None)

    def test_when_the_cpu_is_chosen_then_the_model_is_the_small_or_the_given_one(self) -> None:
        command = SERVICES["worker-cpu"]["command"]

        assert load_config(environment_of("worker-cpu")).model.path is None
        assert parsed(filled(command).split())["model__path"] is None
        assert command.endswith(" ${MODEL:+--model ${MODEL}}")

    @pytest.mark.parametrize("service", WORKERS)
    def test_when_a_model_is_downloaded_then_it_is_kept_in_a_volume_of_the_user(self, service: str) -> None:
        (folder,) = [one.split(":")[1] for one in SERVICES[service]["volumes"] if one.startswith("models:")]

        assert folder == "/home/sluice/.cache/huggingface"
        assert re.search(r"^USER sluice\n(#.*\n)?RUN mkdir --parents ~/.cache/huggingface\b", DOCKERFILE, re.MULTILINE)

    @pytest.mark.parametrize("service", WORKERS)
    def test_when_kernels_are_compiled_then_they_are_kept_in_a_volume_of_the_user(self, service: str) -> None:
        (folder,) = [one.split(":")[1] for one in SERVICES[service]["volumes"] if one.startswith("kernels:")]
        (cache,) = re.findall(r"^ENV TRITON_CACHE_DIR=(.*)$", DOCKERFILE, re.MULTILINE)

        assert folder == "/home/sluice/.cache/sluice"  # of the CPU's kernels, under the home
        assert Path(cache).is_relative_to(folder)
        assert re.search(r"^RUN mkdir --parents .* ~/.cache/sluice\b", DOCKERFILE, re.MULTILINE)
        assert "XDG_CACHE_HOME" not in DOCKERFILE

    def test_when_a_service_ends_its_task_then_a_failure_is_tried_again(self) -> None:
        tasks = {
            name
            for service in SERVICES.values()
            for name, needed in service.get("depends_on", {}).items()
            if needed["condition"] == "service_completed_successfully"
        }

        assert {name: SERVICES[name]["restart"].split(":")[0] for name in tasks} == dict.fromkeys(tasks, "on-failure")

    @pytest.mark.parametrize(("sick", "code"), [(None, 0), ("hung", 1)])
    @pytest.mark.parametrize("service", WORKERS)
    def test_when_health_is_checked_then_the_worker_s_probe_is_asked(
        self, service: str, sick: str | None, code: int
    ) -> None:
        _, program, *arguments = SERVICES[service]["healthcheck"]["test"]
        readiness = Readiness(sick=lambda: sick, unready=lambda: None)
        server = MetricsServer(
            MetricsConfig(port=0), CollectorRegistry(), readiness, IterationFeed(lambda _: None), get_log()
        )
        server.start()
        here = [argument.replace(":9400/", f":{server.port}/") for argument in arguments]

        done = subprocess.run([sys.executable, *here], capture_output=True, check=False)

        server.stop()
        assert program == "python"
        assert done.returncode == code, done.stderr

    @pytest.mark.parametrize("service", WORKERS)
    def test_when_metrics_are_published_then_they_are_served_beyond_loopback(self, service: str) -> None:
        metrics = load_config(environment_of(service)).metrics
        published = [port.split(":") for port in SERVICES[service]["ports"]]

        assert published == [["127.0.0.1", "9400", str(metrics.port)]]
        assert metrics.host == "0.0.0.0"

    def test_when_the_gateway_starts_then_it_has_a_key_and_is_published_on_loopback(self) -> None:
        gateway, key = SERVICES["gateway"], SERVICES["first-key"]
        published = [port.split(":") for port in gateway["ports"]]
        options = parsed(shlex.split(gateway["command"]))

        assert published == [["127.0.0.1", "8000", str(options["port"])]]
        assert options["host"] == "0.0.0.0"
        assert gateway["depends_on"]["first-key"] == {"condition": "service_completed_successfully"}
        assert parsed(shlex.split(key["command"]))["if_none"]
        assert f":{options['port']}/readyz" in gateway["healthcheck"]["test"][-1]

    def test_when_a_webhook_is_to_be_signed_then_callbacks_alone_get_the_key(self) -> None:
        given = [name for name in OURS if "SLUICE_CALLBACKS_SECRET" in SERVICES[name]["environment"]]

        assert given == ["callbacks"]
        assert "-/etc/sluice/callbacks.env" in values_of(
            ROOT / "deploy" / "sluice-callbacks.service", "EnvironmentFile"
        )

    def test_when_a_batch_is_created_then_gateway_and_callbacks_have_the_same_files(self) -> None:
        shared = [SERVICES[name] for name in ("gateway", "callbacks")]
        (folder,) = {service["environment"]["SLUICE_FILES_URL"].removeprefix("file://") for service in shared}

        assert {tuple(service["volumes"]) for service in shared} == {(f"files:{folder}",)}
        assert folder == "/home/sluice/files"
        assert re.search(r"^RUN mkdir --parents .* ~/files$", DOCKERFILE, re.MULTILINE)

    @pytest.mark.parametrize(
        ("service", "needed_s"), [("recorder", FINISH_S + FLUSH_S), ("callbacks", rq_workers.STOP_TIMEOUT_S)]
    )
    def test_when_a_service_is_stopped_then_it_is_not_killed_before_it_has_ended(
        self, service: str, needed_s: float
    ) -> None:
        given_s = float(SERVICES[service].get("stop_grace_period", "10s").removesuffix("s"))  # compose's default

        assert given_s >= needed_s + 5  # its process needs some time to end

    def test_when_a_service_waits_for_another_then_that_one_is_there(self) -> None:
        needed = {name for service in SERVICES.values() for name in service.get("depends_on", {})}

        assert needed <= SERVICES.keys()


class TestGivenTheDockerfile:
    def test_when_the_image_is_built_then_what_it_copies_is_there(self) -> None:
        copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]

        sources = [source for line in copied for source in line]

        assert {
            "pyproject.toml",
            "engine",
            "gateway",
            "history",
            "kernels",
            "migrations",
            "producer",
            "protocol",
            "worker",
        } <= set(sources)
        assert [source for source in sources if not (ROOT / source).exists()] == []

    def test_when_it_is_installed_then_every_setting_has_what_it_needs(self) -> None:
        """SLUICE_FILES_URL may be a bucket, and the recorder may export traces."""
        (extras,) = re.findall(r"pip install .*'\.\[(.*)\]'", DOCKERFILE)
        optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

        installed = {requirement for name in extras.split(",") for requirement in optional[name]}

        needed = {
            one for name, requirements in optional.items() if name not in ("dev", "embedded") for one in requirements
        }
        assert installed == needed

    def test_when_it_is_installed_then_torch_and_triton_are_those_that_ran_on_a_card(self) -> None:
        ran = dict(re.findall(r"^(torch|triton)==(.*)$", GPU_VERSIONS, re.MULTILINE))
        given = dict(re.findall(r"^ARG (TORCH|TRITON)=(.*)$", DOCKERFILE, re.MULTILINE))
        page = (ROOT / "docs" / "guide" / "gpu.md").read_text()

        assert given == {name.upper(): version for name, version in ran.items()}
        assert all(f"{name} {version}".lower() in page.lower() for name, version in ran.items())

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

    @pytest.mark.parametrize("unit", UNITS, ids=name_of)
    def test_when_a_unit_takes_too_much_then_it_has_limits(self, unit: Path) -> None:
        limits = [values_of(unit, name) for name in ("MemoryMax", "CPUQuota", "TasksMax")]

        assert [len(values) for values in limits] == [1, 1, 1]

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


class TestGivenACommandLineThatIsRefused:
    """So that the tests above can fail."""

    @pytest.mark.parametrize(
        "command",
        ["worker start --modle x", "worker record extra", "worker start --gpu one", "producer serve --prot 1"],
    )
    def test_when_it_is_parsed_then_it_is_a_misuse(self, command: str) -> None:
        with pytest.raises(click.UsageError):
            parsed(shlex.split(command))
