"""The folder for persistent state: the embedded server, its SQLite history, and journals. Used by both sides."""

import os
from collections.abc import Mapping
from pathlib import Path

STATE_DIR = "SLUICE_STATE_DIR"


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for persistent state (XDG Base Directory Specification, state home)."""
    if own := environ.get(STATE_DIR):
        return Path(own).expanduser().absolute()
    home = environ.get("XDG_STATE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path("~/.local/state").expanduser()
    return base / "sluice"


def history_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the SQLite history next to the embedded server."""
    return state_dir(environ) / "history.db"
