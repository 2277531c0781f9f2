"""The tests for a GPU must begin where a GPU is: with torch, triton, transformers, pytest and hypothesis alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.card_packages import card_environment

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("tests/kernels_triton", "tests/engine/execution")


class TestGivenAMachineThatLacksTheServicesPackages:
    @pytest.mark.slow
    def test_when_tests_for_a_card_are_collected_then_every_file_can_be_imported(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "pytest", "-c", "tests/gpu.ini", *FOLDERS, "--collect-only", "-q"]

        done = subprocess.run(
            command, cwd=ROOT, env=card_environment(tmp_path), capture_output=True, text=True, check=False
        )

        assert done.returncode == 0, done.stdout + done.stderr
        assert int(re.findall(r"(\d+)/\d+ tests collected", done.stdout)[0]) > 500

    def test_when_a_test_needs_a_card_then_it_is_in_a_folder_that_is_run_there(self) -> None:
        marked = [
            str(path.relative_to(ROOT))
            for path in (ROOT / "tests").rglob("test_*.py")
            if path != Path(__file__) and re.search(r"mark\.gpu|devices import .*DEVICES", path.read_text())
        ]

        assert marked
        assert [path for path in marked if not path.startswith(FOLDERS)] == []
