"""The tests for a card must begin where a card is: with torch, triton, transformers, pytest and hypothesis alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("tests/kernels_triton", "tests/engine/execution")
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


class TestGivenAMachineThatLacksTheServicesPackages:
    @pytest.mark.slow
    def test_when_tests_for_a_card_are_collected_then_every_file_can_be_imported(self, tmp_path: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
        # Entry points of absent plugins would be loaded.
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        command = [sys.executable, "-m", "pytest", "-c", "tests/gpu.ini", *FOLDERS, "--collect-only", "-q"]

        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
        )

        assert done.returncode == 0, done.stdout + done.stderr
        assert int(re.findall(r"(\d+)/\d+ tests collected", done.stdout)[0]) > 500

    def test_when_a_test_needs_a_card_then_it_is_in_a_folder_that_is_run_there(self) -> None:
        marked = [
            str(path.relative_to(ROOT))
            for path in (ROOT / "tests").rglob("test_*.py")
            if path != Path(__file__) and re.search(r"mark\.gpu|devices import .*(DEVICES|ONE_DTYPE)", path.read_text())
        ]

        assert marked
        assert [path for path in marked if not path.startswith(FOLDERS)] == []
