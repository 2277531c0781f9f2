"""Environments of peers: pinned packages in a folder outside the tree, and programs that run in it.

Environments live in `BENCHMARK_PEERS_DIR`, else in `~/.cache/sluice/peers`. One is rebuilt when its recipe changes.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Installation of a peer."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    """Arguments of `pip install`, one tuple for each call."""

    uninstalls: tuple[str, ...] = ()
    """Packages to uninstall afterwards."""


def peers_folder() -> Path:
    """Return the folder of the environments."""
    return Path(os.environ.get("BENCHMARK_PEERS_DIR", "~/.cache/sluice/peers")).expanduser()


def is_installed(recipe: Recipe) -> bool:
    """Whether its environment exists and matches the recipe."""
    mark = peers_folder() / recipe.name / "recipe.json"
    return mark.is_file() and mark.read_text() == _mark(recipe)


def python_of(recipe: Recipe) -> Path:
    """Return the interpreter of a peer's environment, creating it if necessary.

    Raises:
        subprocess.CalledProcessError: a package could not be installed.
    """
    folder = peers_folder() / recipe.name
    python = folder / "bin" / "python"
    if not is_installed(recipe):
        print(f"installing {recipe.name} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=bool(recipe.installs), symlinks=True)
        for arguments in recipe.installs:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)
        if recipe.uninstalls:
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *recipe.uninstalls], check=True)
        (folder / "recipe.json").write_text(_mark(recipe))
    return python


def _mark(recipe: Recipe) -> str:
    return json.dumps({"python": sys.version_info[:2], "installs": recipe.installs, "uninstalls": recipe.uninstalls})


def ask(command: Sequence[str | Path], environ: Mapping[str, str], folder: Path) -> Any:  # noqa: ANN401 - whatever JSON it prints
    """Run a program of a peer to its end; return its last line, parsed.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])
