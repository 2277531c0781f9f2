"""Kernels that wheels carry: the best library for the processor is loaded, and no compiler is needed."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from sluice.kernels import native
from sluice.kernels.compiler import VARIANTS, compile_library, find_compiler, runnable_variants, sources

REPOSITORY = Path(__file__).parents[2]

HASWELL = "sse4_2 avx avx2 bmi1 bmi2 f16c fma abm movbe"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
ICE_LAKE = f"{SKYLAKE} avx512_vnni avx512ifma"
ZEN_4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_tile amx_bf16 amx_int8"


class TestGivenAProcessor:
    @pytest.mark.parametrize(
        ("features", "best"),
        [
            ("sse4_2 avx", None),
            (HASWELL, "avx2"),
            (SKYLAKE, "avx512"),
            (ICE_LAKE, "avx512_vnni"),
            (ZEN_4, "avx512_bf16"),
            (SAPPHIRE_RAPIDS, "amx"),
            # A virtual machine may hide single features.
            (SAPPHIRE_RAPIDS.replace("fma ", ""), None),
            (SAPPHIRE_RAPIDS.replace("amx_int8", ""), "avx512_bf16"),
        ],
    )
    def test_when_variants_are_chosen_then_the_best_that_it_runs_is_first(
        self, features: str, best: str | None
    ) -> None:
        names = [variant.name for variant in runnable_variants(features.split())]

        assert (names[0] if names else None) == best
        assert names == [variant.name for variant in VARIANTS if variant.name in names]


class TestGivenALimitOfTheInstructionSet:
    def test_when_it_is_of_this_processor_then_no_better_variant_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not runnable_variants(Path("/proc/cpuinfo").read_text().split()):
            pytest.skip("wheels have no library for this processor")
        monkeypatch.setattr(native, "ROOT", tmp_path)
        (tmp_path / "compiled").mkdir()
        for variant in VARIANTS:
            (tmp_path / "compiled" / f"{variant.name}.so").touch()

        monkeypatch.setenv("SLUICE_INSTRUCTION_SET", "avx2")

        assert native.packaged_library() == tmp_path / "compiled" / "avx2.so"

    def test_when_it_is_unknown_then_that_is_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("SLUICE_INSTRUCTION_SET", "avx3")

        assert native.library.__wrapped__() is None

        assert "SLUICE_INSTRUCTION_SET=avx3 is not one of amx, avx512_bf16" in caplog.records[0].getMessage()


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the wheel's libraries would be; no compiler is found, and the cache is empty."""
    folder = tmp_path / "compiled"
    folder.mkdir()
    monkeypatch.setattr(native, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder


class TestGivenNoCompiler:
    def test_when_a_library_is_packaged_then_it_is_loaded_with_torchs_openmp(
        self, compiled: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        variants = runnable_variants(Path("/proc/cpuinfo").read_text().split())
        if not variants:
            pytest.skip("wheels have no library for this processor")
        (source,) = [path for path in sources() if path.parent.name == "rms_norm"]
        path = compiled / f"{variants[-1].name}.so"
        with monkeypatch.context() as patch:
            patch.setenv("PATH", os.defpath)
            compile_library(path, [source], compiler=find_compiler(["gcc"]), options=variants[-1].options, link=[])

        found = native.library.__wrapped__()

        assert native.packaged_library() == path
        assert found is not None
        assert hasattr(found, "sluice_rms_norm")

    def test_when_none_is_packaged_then_the_loss_and_the_remedy_are_logged(
        self, compiled: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert native.library.__wrapped__() is None

        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage() == (
            "no native kernels: no C compiler (cc, gcc, clang). Generation on the CPU is about seven times slower "
            "without them. Install a C compiler (gcc), or a wheel of sluice-llm that has them for this processor."
        )

    def test_when_the_packaged_one_is_damaged_then_that_is_logged_too(
        self, compiled: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for variant in VARIANTS:
            (compiled / f"{variant.name}.so").write_bytes(b"no library")

        assert native.library.__wrapped__() is None

        assert "the packaged kernels cannot be loaded" in caplog.records[0].getMessage()


def wheel(folder: Path, **environ: str) -> Path:
    """Build the wheel of this checkout as an installer does."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPOSITORY]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=inherited | environ, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr:
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as built with gcc, which takes a minute."""
    return wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
@pytest.mark.timeout(900)
class TestGivenAWheel:
    def test_when_built_with_gcc_then_a_machine_without_runs_the_kernels(self, built: Path, tmp_path: Path) -> None:
        zipfile.ZipFile(built).extractall(tmp_path / "site")
        program = (
            "import torch; from sluice.kernels.native import library, packaged_library;"
            "from sluice.kernels.linear.native import NativeLinear;"
            "ones = lambda *shape: torch.ones(shape, dtype=torch.bfloat16);"
            "assert library() is not None;"
            "print(packaged_library(), NativeLinear(ones(64, 512), None)(ones(2, 512)).unique().tolist())"
        )
        nowhere = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "site")}

        done = subprocess.run(
            [sys.executable, "-P", "-c", program], env=nowhere, cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

        best = runnable_variants(Path("/proc/cpuinfo").read_text().split())[0].name
        assert done.stdout == f"{tmp_path}/site/sluice/kernels/compiled/{best}.so [512.0]\n", done.stderr
        assert not (tmp_path / ".cache").exists(), "nothing was compiled"

    def test_when_built_with_gcc_then_its_tag_is_the_glibc_that_it_needs(self, built: Path) -> None:
        (tag,) = parse_wheel_filename(built.name)[3]

        with zipfile.ZipFile(built) as archive:
            libraries = [name for name in archive.namelist() if name.startswith("sluice/kernels/compiled/")]
            needed = {
                (int(major), int(minor))
                for name in libraries
                for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", archive.read(name))
            }
        assert len(libraries) == len(VARIANTS)
        assert tag.platform == "manylinux_{}_{}_x86_64".format(*max(needed))
        assert tag in sys_tags(), "it can be installed here"

    def test_when_built_without_a_compiler_then_it_is_pure(self, tmp_path: Path) -> None:
        path = wheel(tmp_path / "wheel", PATH=str(tmp_path))

        assert path.name.endswith("-py3-none-any.whl")
