"""The environment of an engine's process, which may be another than the worker's: what is installed there."""

import subprocess
import sys
from collections.abc import Collection

from sluice.worker.config import ModelConfig
from sluice.worker.errors import ConfigError

_PRINT_RELEASES = """
from importlib.metadata import distributions
for one in distributions():
    print(one.name, one.version)
"""


def release_of(model: ModelConfig, engine: str, *, distributions: Collection[str], tried: Collection[str]) -> str:
    """Return the release of an engine in the environment of its process, without importing it.

    Args:
        model: names the Python of that environment.
        engine: for people.
        distributions: names under which it is installed.
        tried: releases with which the conformance suite has passed; others need `engine_untested`.

    Raises:
        ConfigError: it or Sluice is not installed there, or it is a release that was not tried.
    """
    python = model.engine_python or sys.executable
    installed = _installed(python)
    found = next((installed[name] for name in distributions if name in installed), None)
    wanted = {engine: found, "Sluice": installed.get("sluice-llm")}
    if missing := [name for name, release in wanted.items() if release is None]:
        raise ConfigError(
            [
                f"SLUICE_ENGINE: {python} has no {' and no '.join(missing)}: give the Python of an environment that "
                f"has both with --engine-python"
            ]
        )
    release = str(found)
    if release.partition("+")[0] not in tried and not model.engine_untested:
        raise ConfigError(
            [
                f"SLUICE_ENGINE: {engine} {release} has not been tried with this release of Sluice, "
                f"{', '.join(tried)} has: install it, or try yours with --engine-untested"
            ]
        )
    return release


def _installed(python: str) -> dict[str, str]:
    """Return the distributions of an environment, with their releases.

    Raises:
        ConfigError: its Python does not run.
    """
    asked = subprocess.run([python, "-c", _PRINT_RELEASES], capture_output=True, text=True, check=False)
    if asked.returncode:
        said = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise ConfigError([f"SLUICE_ENGINE_PYTHON: {python} does not run: {said[0]}"])
    return dict(line.split() for line in asked.stdout.splitlines() if line.count(" ") == 1)
