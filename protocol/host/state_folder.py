"""The folder for persistent state: the embedded server, its SQLite history, and journals. Used by both sides."""

import os
from collections.abc import Mapping
from pathlib import Path

from sluice.protocol.errors import InvalidSetting

STATE_DIR = "SLUICE_STATE_DIR"
FILES_URL = "SLUICE_FILES_URL"


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for persistent state (XDG Base Directory Specification, state home).

    Raises:
        InvalidSetting: the folder is in the home folder, and this user has none.
    """
    home = environ.get("XDG_STATE_HOME", "")
    base = home if Path(home).is_absolute() else "~/.local/state"
    try:
        return Path(environ.get(STATE_DIR) or f"{base}/sluice").expanduser().absolute()
    except RuntimeError as error:
        raise InvalidSetting(f"there is no home folder for the state folder: set {STATE_DIR}") from error


def files_url(argument: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the URL of the HTTP gateway's files: the argument, the environment, or a folder in the state folder.

    Raises:
        InvalidSetting: as `state_dir`.
    """
    return argument or environ.get(FILES_URL) or f"file://{state_dir(environ) / 'files'}"


def history_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the SQLite history next to the embedded server."""
    return state_dir(environ) / "history.db"
