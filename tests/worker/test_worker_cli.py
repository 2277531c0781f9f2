"""The command line: each command shows the settings that it reads, and no secret is ever a flag."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from click.testing import CliRunner

from sluice.worker.cli import main
from sluice.worker.config import SETTINGS
from sluice.worker.errors import ExitCode


def flags_of(command: str) -> set[str]:
    """Every flag of a command."""
    return {flag for parameter in main.commands[command].params for flag in parameter.opts}


def flags_in(*sections: str) -> set[str]:
    """The flags of these sections' settings."""
    return {leaf.flag for leaf in SETTINGS if leaf.section in sections}


class TestGivenTheCommands:
    def test_when_all_are_asked_then_every_setting_but_the_secret_has_a_flag_somewhere(self) -> None:
        shown = {flag for command in main.commands for flag in flags_of(command)}

        # --gpu and --cpu stand for the device.
        assert {leaf.flag for leaf in SETTINGS} - shown == {"--device", "--callbacks-secret"}

    @pytest.mark.parametrize("command", sorted(main.commands))
    def test_when_the_secret_is_given_as_a_flag_then_it_is_misuse(self, command: str) -> None:
        result = CliRunner().invoke(main, [command, "--callbacks-secret", "hunter2"])

        assert result.exit_code == ExitCode.MISUSED
        assert "hunter2" not in result.output

    @pytest.mark.parametrize("command", ["start", "doctor"])
    def test_when_commands_are_listed_then_they_have_exactly_the_worker_s_options(self, command: str) -> None:
        flags = flags_of(command)

        assert flags_in("redis", "queue", "batching", "beat", "drain", "metrics", "log") <= flags
        assert {"--gpu", "--cpu", "--model"} <= flags
        assert flags & flags_in("callbacks") == set()

    @pytest.mark.parametrize("command", ["status", "migrate", "record", "callbacks"])
    def test_when_another_command_is_asked_then_it_has_nothing_of_the_engine(self, command: str) -> None:
        assert flags_of(command) & (flags_in("model", "batching", "beat", "drain", "metrics") | {"--gpu"}) == set()

    def test_when_callbacks_are_asked_then_they_say_where_the_secret_is_read(self) -> None:
        assert "SLUICE_CALLBACKS_SECRET" in CliRunner().invoke(main, ["callbacks", "--help"]).output


class TestGivenAnInstallationOfTheClient:
    """None of the packages of the extra `worker`."""

    PROGRAM = """
import sys
sys.modules |= dict.fromkeys(("alembic", "jinja2", "numpy", "prometheus_client", "psutil", "structlog", "torch"))
from sluice.worker.cli import main
main()
"""

    @pytest.mark.parametrize("command", ["start", "migrate"])
    def test_when_a_command_needs_more_then_it_says_what_to_install(self, command: str) -> None:
        done = subprocess.run(
            [sys.executable, "-P", "-c", self.PROGRAM, command], capture_output=True, text=True, check=False
        )

        assert done.returncode == ExitCode.MISUSED
        assert done.stderr.count("\n") == 1
        assert "pip install 'sluice-llm[worker]'" in done.stderr

    def test_when_the_version_is_asked_then_it_is_that_of_the_distribution(self) -> None:
        assert CliRunner().invoke(main, ["--version"]).output.strip() == version("sluice-llm")


class TestGivenADoctorForAGpu:
    def test_when_both_devices_are_asked_for_then_it_is_misuse(self) -> None:
        assert CliRunner().invoke(main, ["doctor", "--gpu", "0", "--cpu"]).exit_code == ExitCode.MISUSED
