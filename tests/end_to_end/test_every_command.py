"""Every command of `producer` and `worker` in conditions that no one plans for: it ends, and says why in few words."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sluice.producer.cli.main import cli as producer
from sluice.worker.cli import main as worker
from tests.rules.commands import below

SCRIPTS = Path(sys.executable).parent
COLUMNS = 40
MOST_LINES = 12
"""Of an error, with the usage."""

GIVEN = {
    "producer ask": ["Hello", "--timeout", "3"],
    "producer stream": ["0.default.order-17"],
    "producer result": ["0.default.order-17", "--timeout", "3"],
    "producer submit": ["jobs.jsonl"],
    "producer follow": ["nightly"],
    "producer cancel": ["0.default.order-17"],
    "producer requeue": ["0.default.order-17"],
    "producer delete": ["0.default.order-17"],
    "producer jobs show": ["0.default.order-17"],
    "producer batches show": ["nightly"],
    "producer batches close": ["nightly"],
    "producer batches expire": ["nightly", "--in", "5m"],
    "producer schedules add": ["report", "--cron", "@daily", "--prompt", "Hello"],
    "producer schedules next": ["report"],
    "producer schedules pause": ["report"],
    "producer schedules resume": ["report"],
    "producer schedules remove": ["report"],
    "producer schedules run": ["--once"],
    "producer queues set": ["--max-waiting-jobs", "5"],
    "producer keys create": ["--tenant", "acme"],
    "producer keys revoke": ["abcdef"],
    "producer prices set": ["small_model", "--input", "1", "--output", "1"],
    "producer serve": ["--port", "0"],
    "worker start": ["--cpu", "--metrics-port", "0"],
    "worker fleet": ["--cpu", "--metrics-port", "0"],
    "worker tune": ["./no-such-model"],
    "worker migrate": ["--wait", "3"],
}
"""Arguments, where a command needs some."""

END_WITHIN_S = 120
"""On a busy machine: `worker doctor` waits 15 s for two servers that hang, and imports torch."""

SERVICES = {"producer serve", "worker start", "worker fleet", "worker record", "worker callbacks", "worker top"}
"""They wait for their servers, and run until they are stopped."""


def leaves(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command below a group, with its name."""
    if not isinstance(group, click.Group):
        yield path, group
        return
    for name, command in below(group).items():
        yield from leaves(command, f"{path} {name}")


PROGRAMS = {"producer": producer, "worker": worker}
COMMANDS = {name: command for program, group in PROGRAMS.items() for name, command in leaves(group, program)}


def numbers() -> list[tuple[str, str]]:
    """Options whose value is a number in a range: the names of command and option."""
    return [
        (name, option.opts[-1])
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option) and isinstance(option.type, click.IntRange | click.FloatRange)
    ]


@contextmanager
def hanging_server() -> Generator[int]:
    """A server that accepts connections and never answers; yields its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def run(
    name: str, folder: Path, *, port: int = 1, state: str | None = None, arguments: list[str] | None = None,
    stdout: int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a command against a Redis and a PostgreSQL at a port of this host; stop a service after some seconds."""
    (folder / "jobs.jsonl").write_text('{"prompt": "Hello"}\n')
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
    environment |= {"SLUICE_STATE_DIR": state or str(folder / "state"), "COLUMNS": str(COLUMNS)}
    if state is None:
        environment |= {
            "SLUICE_REDIS_URL": f"redis://127.0.0.1:{port}/0",
            "SLUICE_DATABASE_URL": f"postgresql+psycopg://sluice@127.0.0.1:{port}/sluice",
        }
    program, *rest = name.split()
    command = [str(SCRIPTS / program), *rest, *(GIVEN.get(name, []) if arguments is None else arguments)]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=stdout,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=8 if name in SERVICES else END_WITHIN_S)
    except subprocess.TimeoutExpired:
        assert name in SERVICES, f"{name} does not end"
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=END_WITHIN_S)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.fixture(params=COMMANDS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class TestGivenANarrowTerminal:
    def test_when_help_is_asked_for_then_it_fits(self, name: str) -> None:
        program, *rest = name.split()

        done = CliRunner().invoke(PROGRAMS[program], [*rest, "--help"], terminal_width=COLUMNS)

        assert done.exit_code == 0, done.output
        assert done.output.startswith("Usage:")
        # Examples, names of options and words are not broken.
        prose = [line for line in done.output.splitlines() if line.startswith("  ") and not line.startswith("   ")]
        assert [line for line in prose if len(line) > COLUMNS and "--" not in line and len(line.split()) > 3] == []


class TestGivenNoNumber:
    @pytest.mark.parametrize(("name", "option"), numbers())
    @pytest.mark.parametrize("value", ["nonsense!", "nan", "-1e999", "1e999", ""])
    def test_when_it_is_given_then_it_is_a_misuse(self, name: str, option: str, value: str) -> None:
        program, *rest = name.split()
        arguments = [*rest, *GIVEN.get(name, []), f"{option}={value}"]

        done = CliRunner().invoke(PROGRAMS[program], arguments)

        assert done.exit_code == 2, (done.output, done.exception)
        assert f"Invalid value for '{option}'" in done.output


@pytest.mark.long
class TestGivenNoServer:
    def test_when_a_command_is_run_then_it_says_so(self, name: str, tmp_path: Path) -> None:
        done = run(name, tmp_path)

        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        assert name in SERVICES or done.returncode != 0 or "server" in name, done.stdout
        assert len(done.stderr.splitlines()) <= MOST_LINES * (3 if name in SERVICES else 1), done.stderr


@pytest.mark.long
class TestGivenAServerThatHangs:
    def test_when_a_command_is_run_then_it_ends_and_says_so(self, name: str, tmp_path: Path) -> None:
        with hanging_server() as port:
            began_s = time.monotonic()
            done = run(name, tmp_path, port=port)

        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        assert name in SERVICES or done.returncode != 0 or "server" in name, done.stdout
        assert time.monotonic() - began_s < END_WITHIN_S


@pytest.mark.long
class TestGivenAStateFolderThatCannotBeWritten:
    def test_when_a_command_is_run_then_it_says_so(self, name: str, tmp_path: Path) -> None:
        done = run(name, tmp_path, state="/proc/none")

        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        assert done.returncode != 0 or name in SERVICES or "server" in name, done.stdout


@pytest.mark.long
class TestGivenAReaderThatIsGone:
    @pytest.mark.parametrize("arguments", [["--help"], None], ids=["help", "run"])
    def test_when_a_command_prints_then_it_ends_quietly(
        self, name: str, tmp_path: Path, arguments: list[str] | None
    ) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        try:
            done = run(name, tmp_path, arguments=arguments, stdout=writing)
        finally:
            os.close(writing)

        assert "Traceback" not in done.stderr, done.stderr
        assert "BrokenPipe" not in done.stderr, done.stderr
