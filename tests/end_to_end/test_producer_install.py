"""The distribution as a web backend installs it: its base alone, without torch, and without any configuration."""

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sluice.protocol.redis import embedded
from tests.servers import RedisServer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder whose server is stopped with the test."""
    with TemporaryDirectory(prefix="sluice-") as folder:
        yield Path(folder)
        embedded.stop(Path(folder))


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command with this added to the environment, and without what configures Sluice."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    return subprocess.run(
        command, env={**inherited, **environ}, capture_output=True, text=True, check=False, timeout=300
    )


class TestGivenNoConfiguration:
    def test_when_a_job_is_submitted_from_one_process_then_the_next_process_finds_it(self, state: Path) -> None:
        program = "from sluice.producer import Producer; print(Producer().submit('hello').id)"
        submitted = run(sys.executable, "-c", program, SLUICE_STATE_DIR=str(state))
        look = f"from sluice.producer import Producer; print(Producer().status('{submitted.stdout.strip()}').state)"

        looked = run(sys.executable, "-c", look, SLUICE_STATE_DIR=str(state))

        assert submitted.returncode == 0, submitted.stderr
        assert looked.stdout == "queued\n"
        assert embedded.state_of(embedded.Embedded(state)) is embedded.ServerState.STOPPED, "its last user has ended"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the base distribution, from the package index."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    # Without the kernels, which take a minute to compile.
    command = str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", str(REPOSITORY)
    installed = run(*command, HATCH_BUILD_NO_HOOKS="true")
    if installed.returncode != 0 and "No matching distribution" in installed.stderr:
        pytest.skip("needs a package index")
    assert installed.returncode == 0, installed.stderr
    return folder / "bin" / "python"


@pytest.mark.long
class TestGivenTheBaseDistributionInAFreshEnvironment:
    def test_when_a_job_is_submitted_then_it_is_on_the_queue_and_no_torch_is_there(
        self, python: Path, valkey: RedisServer
    ) -> None:
        program = """
import importlib.util, sys
from sluice.producer import Producer
assert importlib.util.find_spec("torch") is None
with Producer(sys.argv[1]) as producer:
    print(producer.status(producer.submit("hello")).state)
"""
        submitted = run(str(python), "-I", "-c", program, valkey.url)

        assert (submitted.returncode, submitted.stdout) == (0, "queued\n"), submitted.stderr

    def test_when_its_command_is_run_then_it_works(self, python: Path, valkey: RedisServer) -> None:
        listed = run(str(python.parent / "producer"), "queues", "list", "--redis-url", valkey.url)

        assert listed.returncode == 0, listed.stderr

    def test_when_a_worker_is_started_then_it_says_what_to_install(self, python: Path, valkey: RedisServer) -> None:
        started = run(str(python.parent / "worker"), "start", "--redis-url", valkey.url)

        assert started.returncode == 2
        assert started.stderr.count("\n") == 1
        assert "pip install 'sluice-llm[worker]'" in started.stderr

    def test_when_a_model_is_asked_for_then_it_says_what_to_install(self, python: Path) -> None:
        imported = run(str(python), "-I", "-c", "from sluice import SamplingParams, Producer\nfrom sluice import LLM")

        assert imported.stderr.splitlines()[-1].startswith("ImportError: LLM needs the package")
        assert "pip install 'sluice-llm[worker]'" in imported.stderr
