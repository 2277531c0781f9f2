"""Benchmarks of this CPU measure the native kernels, or nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.kernels.native import packaged_library
from tests.grids import fast_only

ROOT = Path(__file__).parents[2]
COMPILER = """#!/bin/sh
echo "native.c: In function 'f':" >&2
echo "native.c:1:1: error: 'x' undeclared" >&2
exit 1
"""


@pytest.mark.skipif(packaged_library() is not None, reason="the kernels are packaged")
class TestGivenACompilerThatFails:
    @pytest.mark.parametrize("name", fast_only(["gate"], ["engine", "engines"]))
    def test_when_this_cpu_is_measured_then_one_sentence_names_the_error(self, tmp_path: Path, name: str) -> None:
        compiler = tmp_path / "cc"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}

        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", name],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )

        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines()[-1] == (
            "There are no native kernels, and PyTorch's operators, seven times slower, are not measured: the C "
            "compiler failed: native.c:1:1: error: 'x' undeclared"
        )
