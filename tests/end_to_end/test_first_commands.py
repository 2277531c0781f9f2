"""The README's commands as a new user runs them: no root, an empty home, an environment outside of the checkout.

`test_readme.py` runs the commands of every page; these tests look at what the first ones print.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
NOBODY = 65534
NEVER_COPIED = (".venv", ".git", ".*_cache", "__pycache__", ".demo", "shared")
INSTALL = re.search(r"`(pip install '\.\[[^`]*)`", README)
"""What the README names instead of its first line, until the distribution is published."""

PRINTED = {
    "worker doctor": (0, r"\nok +model: .*with chat template\n"),
    'producer ask "What is 12 + 30?"': (0, r"\A\d+ \+ \d+ = \d+\.\n\Z"),
    "worker status": (0, r" small_model .* pulling "),
    "worker start --gpu 0 --model ./my-model": (2, r"SLUICE_(DEVICE: there is no GPU 0|MODEL: ./my-model is not)"),
    "producer submit questions.jsonl --wait -o answers.jsonl": (0, r"Successful requests: +2\n"),
    "worker audit": (0, r"All sources agree"),
}
"""Exit code and output of each command but the first two, in the order of the README."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def commands() -> list[str]:
    """The commands of the README from "Install and run" on, comments cut."""
    text = README.partition("## Install and run")[2]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    return [line.split("  #")[0].strip() for line in lines]


GO_ON = {"worker start --cpu", "producer serve --port 8000"}
"""Commands that serve until they are stopped."""


def snippet() -> str:
    """The README's Python that needs no other package and no queue."""
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "LLM()" in block]
    return found


@dataclass(frozen=True)
class User:
    """A user without root, whose home has nothing but a copy of the checkout."""

    home: Path
    become: tuple[str, ...]
    """The command that runs another one as this user."""

    @property
    def environ(self) -> dict[str, str]:
        """An environment without anything of ours; another worker of the machine may have the usual port."""
        path = f"{self.home}/venv/bin:{os.defpath}"
        return {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "SLUICE_METRICS_PORT": "0"}

    def start(self, command: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a command that goes on."""
        with log.open("wb") as file:
            return subprocess.Popen(
                [*self.become, "bash", "-c", f"exec {command}"],
                cwd=folder, env=self.environ, stdout=file, stderr=file,
            )  # fmt: skip

    def run(self, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command as it is printed."""
        return subprocess.run(
            [*self.become, "bash", "-c", command],
            cwd=folder, env=self.environ, capture_output=True, text=True, timeout=800, check=False,
        )  # fmt: skip


def question(text: str) -> str:
    """A line of a file of jobs."""
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 16})


def become_nobody() -> tuple[str, ...]:
    """Return what runs a command without root."""
    if os.geteuid() != 0:
        return ()
    if (setpriv := shutil.which("setpriv")) is None:
        pytest.skip("needs setpriv (util-linux) to leave root")
    return setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"


def interpreter(user: User) -> str:
    """Return a Python that the user can run: root's own is often in root's home."""
    own = Path(sys.executable).resolve()
    for path in (own, *(Path(folder) / own.name for folder in os.defpath.split(":"))):
        if user.run(f"test -x {path} && {path} -c 'import ensurepip'", Path("/")).returncode == 0:
            return str(path)
    pytest.skip(f"the user can run no {own.name}")


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    """A new user who has installed the distribution."""
    with TemporaryDirectory(prefix="sluice-") as folder:
        home = Path(folder)
        shutil.copytree(ROOT, home / "checkout", symlinks=True, ignore=shutil.ignore_patterns(*NEVER_COPIED))
        user = User(home, become_nobody())
        if user.become:
            for path in (home, *home.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        assert INSTALL is not None
        created = user.run(f"{interpreter(user)} -m venv venv", home)
        assert created.returncode == 0, created.stdout + created.stderr
        installed = user.run(INSTALL[1], home / "checkout")
        if "No matching distribution" in installed.stderr:
            pytest.skip("needs a package index")
        assert installed.returncode == 0, installed.stderr
        yield user


@pytest.fixture(scope="module")
def project(user: User) -> Iterator[Path]:
    """A folder of the user, with a worker that the README's command started."""
    folder = user.home / "project"
    assert user.run("mkdir project", user.home).returncode == 0
    log = user.home / "worker.log"
    worker = user.start("worker start --cpu", folder, log)
    try:
        deadline_s = time.monotonic() + 240
        while "worker started" not in log.read_text():
            assert worker.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        yield folder
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)


class TestGivenANewUser:
    def test_when_the_readme_is_read_then_each_of_its_commands_is_run_here(self) -> None:
        install, *rest = commands()

        assert install.startswith("pip install ")
        assert [command for command in rest if command not in GO_ON] == list(PRINTED)

    @pytest.mark.parametrize("command", PRINTED)
    def test_when_a_command_is_run_then_it_prints_what_it_is_for(self, user: User, project: Path, command: str) -> None:
        self._write(project / "questions.jsonl", "".join(f"{question('What is 2 + 3?')}\n" for _ in range(2)))
        code, words = PRINTED[command]

        done = user.run(command, project)

        assert done.returncode == code, done.stdout + done.stderr
        assert re.search(words, done.stdout + done.stderr * (code != 0)), done.stdout + done.stderr
        assert "Traceback" not in done.stderr

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o644)  # whatever the mask that a test before has set

    def test_when_the_file_of_jobs_is_done_then_its_outputs_answer(self, project: Path) -> None:
        outputs = [json.loads(line) for line in (project / "answers.jsonl").read_text().splitlines()]

        texts = [output["response"]["body"]["choices"][0]["message"]["content"] for output in outputs]

        assert len(texts) == 2
        assert all(re.search(r"\d", text) for text in texts), texts

    def test_when_the_python_is_run_then_it_prints_texts(self, user: User, project: Path) -> None:
        self._write(project / "first.py", snippet())

        done = user.run("python first.py", project)

        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) > 10, done.stdout

    def test_when_everything_has_run_then_it_is_all_in_the_home(self, user: User, project: Path) -> None:
        found = user.run("python -c 'import sluice; print(sluice.__file__)'", project)

        assert found.stdout.startswith(f"{user.home}/venv/")
        assert (user.home / ".local/state/sluice/history.db").is_file()
