"""Building the native library: kept, rebuilt when sources change, and done without where there is no compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

from sluice.kernels import native
from sluice.kernels.native import library, load_library


@pytest.fixture
def _of_one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the library from one kernel, which takes a fraction of the time."""
    source = Path(native.__file__).parent / "rms_norm/native.c"
    monkeypatch.setattr(native, "_sources", lambda: [source])


@pytest.mark.usefixtures("_of_one_source")
class TestGivenAnEmptyFolder:
    def test_when_libraries_are_loaded_then_each_instruction_set_is_built_once(self, tmp_path: Path) -> None:
        load_library("native", tmp_path)
        (built,) = tmp_path.iterdir()
        first = built.stat().st_mtime_ns

        load_library("native", tmp_path)
        load_library("x86-64", tmp_path)

        assert built.stat().st_mtime_ns == first
        assert len(list(tmp_path.iterdir())) == 2


class TestGivenNoCompiler:
    def test_when_kernels_run_then_torch_does_the_work(self, tmp_path: Path) -> None:
        code = (
            "import torch; from sluice.kernels.rms_norm import rms_norm; from sluice.kernels.native import library;"
            "print(library(), rms_norm(torch.ones(1, 4), torch.ones(4), eps=0.0).tolist())"
        )
        nowhere = {"PATH": str(tmp_path), "HOME": str(tmp_path)}

        done = subprocess.run([sys.executable, "-c", code], env=nowhere, capture_output=True, text=True, check=False)

        assert done.stdout.strip() == "None [[1.0, 1.0, 1.0, 1.0]]", done.stderr


class TestGivenMoreThreadsThanATeamHolds:
    def test_when_a_product_is_computed_then_it_is_the_same(self) -> None:
        if library() is None:
            pytest.skip("there is no C compiler")
        code = (
            "import torch; from sluice.kernels.linear.native import NativeLinear;"
            "ones = lambda *shape: torch.ones(shape, dtype=torch.bfloat16);"
            "torch.set_num_threads(400); print(NativeLinear(ones(1024, 512), None)(ones(2, 512)).unique().tolist())"
        )

        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

        assert done.stdout.strip() == "[512.0]", done.stderr


def test_a_compiler_that_fails_is_an_error_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(subprocess.SubprocessError, match="compiler failed"):
        load_library("no-such-processor", tmp_path)
