"""Run the code for a GPU on this CPU, under the versions of the machine with a GPU, and with its packages alone.

    make test-gpu-versions                                  # installs 6 GB the first time, then takes half an hour
    python -m tools.gpu_versions --only calls --python python3.12

First the tests of kernels and of the engine's execution that need no GPU: interpreted, and compiled for Hopper. Then
the three calls of `python -m benchmarks gpu`, at toy sizes. The third has the wheels that its service section needs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from benchmarks.gpu.run import CALLS
from benchmarks.gpu.wheels import gather

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
SUITE = ("-c", "tests/gpu.ini", "-q", "-m", "not gpu and not long", "tests/kernels_triton", "tests/engine/execution")
MINUTES = "25"
"""For a call: the interpreter takes its time."""


@dataclass(frozen=True, slots=True)
class Check:
    """A command, and what its environment has beyond this process's."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def passes(self) -> bool:
        """Run it; print how it ended and how long it took."""
        began_s = time.monotonic()
        print(f"== {self.name}", flush=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **self.environment}
        code = subprocess.run(self.command, cwd=ROOT, env=environment, check=False).returncode
        print(f"== {self.name}: exit code {code}, {time.monotonic() - began_s:.0f} s", flush=True)
        return code == 0


def installed(python: str) -> Path:
    """Return the interpreter of an environment with the pinned versions, which is made first if it is not there."""
    digest = sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = Path(sys.prefix) / "gpu_versions" / digest
    made = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([made, "-m", "pip", "install", "--quiet", "--requirement", REQUIREMENTS], check=True)
        (folder / ".ready").touch()
    return made


def checks(python: Path, folder: Path, only: str) -> Iterator[Check]:
    """Yield what to run, with files in `folder`."""
    if only != "calls":
        yield Check("tests", [str(python), "-m", "pytest", *SUITE])
    if only == "suite":
        return
    for call in CALLS:
        out = folder / f"call{call}"
        command = [str(python), "-m", "benchmarks", "gpu", "--device", "cpu", "--call", f"{call}"]
        site = _service_packages(python, folder) if "service" in CALLS[call] else ""
        yield Check(f"call {call}", [*command, "--minutes", MINUTES, "--out", str(out)], {"PYTHONPATH": site})


def _service_packages(python: Path, folder: Path) -> str:
    """Return a folder with what a machine with a GPU lacks for the service, as the guide has it installed there."""
    wheels, site = folder / "wheels", folder / "site"
    if gather(wheels) != 0:
        raise SystemExit("the wheels of the service could not be downloaded")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site]
    subprocess.run([*pip, *wheels.glob("*.whl")], check=True)
    return str(site)


def main() -> int:
    """Run every check; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.12", help="The interpreter to install for.")
    parser.add_argument("--only", choices=["suite", "calls"], default="", help="A part of it.")
    arguments = parser.parse_args()
    python = installed(arguments.python)
    with tempfile.TemporaryDirectory() as folder:
        passed = [check.passes() for check in checks(python, Path(folder), arguments.only)]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
