"""An environment without the packages that a machine with a GPU may lack; it has torch, triton and transformers."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
ABSENT = (
    "alembic", "hiredis", "psycopg", "pytest_asyncio", "pytest_timeout", "redis", "rq", "sqlalchemy", "structlog",
    "xdist", "zstandard",
)  # fmt: skip

SITECUSTOMIZE = f"""
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def card_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process in which these packages cannot be found, by a file in `folder`."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    # Entry points of absent plugins would be loaded.
    return os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }
