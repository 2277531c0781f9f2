"""Building the native library: kept, rebuilt when sources change, and done without where there is no compiler."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
        (built,) = tmp_path.glob("*.so")
        first = built.stat().st_mtime_ns

        load_library("native", tmp_path)
        load_library("x86-64", tmp_path)

        assert built.stat().st_mtime_ns == first
        assert len(list(tmp_path.glob("*.so"))) == 2


class TestGivenProcessesThatStartTogether:
    """A fleet on a new machine: its parent builds the library ahead, each worker needs it at the same moment."""

    def test_when_they_load_it_then_the_compiler_runs_once_per_source(self, tmp_path: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler")
        counted = tmp_path / "bin" / "cc"
        counted.parent.mkdir()
        counted.write_text(f'#!/bin/sh\necho run >> "{tmp_path}/runs"\nexec {compiler} "$@"\n')
        counted.chmod(0o755)
        code = (
            "from pathlib import Path; from sluice.kernels import native;"
            "native._sources = lambda: [Path(native.__file__).parent / 'rms_norm/native.c'];"
        )
        environment = os.environ | {"PATH": f"{counted.parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}

        processes = [
            subprocess.Popen([sys.executable, "-c", code + call], env=environment, stdout=subprocess.PIPE, text=True)
            for call in ("print(native.build_ahead())", *["print(native.library())"] * 3)
        ]
        _, *loaded = [process.communicate()[0] for process in processes]

        assert all("CDLL" in each for each in loaded)
        assert len((tmp_path / "runs").read_text().splitlines()) == 2, "one source is compiled and linked"
        own = tmp_path / "sluice" / f"native-{os.getuid()}"
        assert len(list(own.glob("*.so"))) == 1, "the cache is where XDG_CACHE_HOME says"


class TestGivenAnInstalledWheel:
    @pytest.mark.usefixtures("_of_one_source")
    def test_when_it_has_a_library_for_the_processor_then_none_is_built_ahead(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(native, "packaged_library", lambda: tmp_path / "avx2.so")

        native.build_ahead()

        assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_of_one_source")
class TestGivenALibraryThatAnotherUserCouldWrite:
    """Loading it would run what that user put there."""

    @pytest.mark.parametrize("mode", [0o720, 0o702], ids=["group", "others"])
    @pytest.mark.long
    def test_when_it_is_loaded_then_it_is_built_again(self, tmp_path: Path, mode: int) -> None:
        load_library("native", tmp_path)
        (built,) = tmp_path.glob("*.so")
        first = built.stat().st_ino
        built.chmod(mode)

        load_library("native", tmp_path)

        assert built.stat().st_ino != first
        assert stat.S_IMODE(built.stat().st_mode) == 0o700

    def test_when_it_is_a_link_then_it_is_built_again(self, tmp_path: Path) -> None:
        load_library("native", tmp_path)
        (built,) = tmp_path.glob("*.so")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(b"planted")
        built.unlink()
        built.symlink_to(elsewhere)

        load_library("native", tmp_path)

        assert not built.is_symlink()
        assert elsewhere.read_bytes() == b"planted"

    @pytest.mark.parametrize(
        ("mode", "more_to_the_owner", "is_private"),
        [(0o700, 0, True), (0o720, 0, False), (0o702, 0, False), (0o700, 1, False)],
    )
    def test_when_others_own_it_or_may_write_to_it_then_it_is_not_private(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, more_to_the_owner: int, is_private: bool
    ) -> None:
        built = tmp_path / "native.so"
        built.write_bytes(b"code")
        built.chmod(mode)
        monkeypatch.setattr(os, "getuid", lambda: built.stat().st_uid + more_to_the_owner)

        assert native.is_private(built) is is_private

    @pytest.mark.long
    def test_when_it_belongs_to_them_then_it_is_not_loaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load_library("native", tmp_path)
        (built,) = tmp_path.glob("*.so")
        first = built.stat().st_ino
        monkeypatch.setattr(os, "getuid", lambda: built.stat().st_uid + 1)

        load_library("native", tmp_path)

        assert built.stat().st_ino != first


class TestGivenACacheThatIsNotTheUsers:
    @pytest.mark.parametrize("place", ["home", "temporary"])
    @pytest.mark.parametrize("kind", ["link", "other user"])
    def test_when_the_library_is_asked_for_then_torch_does_the_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        uid = os.getuid() + (kind == "other user")
        folder = tmp_path / (f".cache/sluice/native-{uid}" if place == "home" else f"sluice-{uid}")
        (tmp_path / "planted").mkdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        _ = folder.symlink_to(tmp_path / "planted") if kind == "link" else folder.mkdir(mode=0o777)
        monkeypatch.setenv("HOME", str(tmp_path if place == "home" else "/proc/none"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(os, "getuid", lambda: uid)

        assert library.__wrapped__() is None

        assert "link or belongs to another user" in vars(caplog.records[-1])["error"]

    @pytest.mark.parametrize("kind", ["link", "other user"])
    def test_when_the_folder_above_it_is_not_then_it_is_not_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        above = tmp_path / "sluice"
        (tmp_path / "planted").mkdir()
        _ = above.symlink_to(tmp_path / "planted") if kind == "link" else above.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        found, other = Path.lstat, os.stat_result((0o40777, 0, 0, 2, os.getuid() + 1, 0, 0, 0, 0, 0))

        def lstat(path: Path) -> os.stat_result:
            return other if path == above and kind == "other user" else found(path)

        monkeypatch.setattr(Path, "lstat", lstat)

        with pytest.raises(PermissionError, match=re.escape(f"{above} is a link or belongs to another user")):
            native._cache_folder()  # pyright: ignore[reportPrivateUsage]  # what is tested

    def test_when_there_is_no_home_then_the_temporary_folder_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

        assert native._cache_folder() == tmp_path / f"sluice-{os.getuid()}"  # pyright: ignore[reportPrivateUsage]  # what is tested


@pytest.fixture
def volume() -> Iterator[Path]:
    """A volume as Kubernetes mounts it: root's, with write access for the group of its pods (`fsGroup`)."""
    if os.getuid() != 0:
        pytest.skip("only root can make such a folder")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "sluice"
        folder.mkdir()
        os.chown(folder, 0, 1000)
        folder.chmod(0o2775)
        Path(name).chmod(0o755)
        yield folder


class TestGivenACacheOnAVolume:
    def test_when_the_user_is_of_its_group_then_it_has_a_private_folder_there(self, volume: Path) -> None:
        code = (
            "import os; from sluice.kernels import native;"
            "os.setgroups([]); os.setgid(1000); os.setuid(1000);"
            "print(native._cache_folder(), native._cache_folder().stat().st_mode)"
        )

        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"XDG_CACHE_HOME": str(volume.parent)},
            capture_output=True,
            text=True,
            check=False,
        )

        own, mode = volume / "native-1000", stat.S_IFDIR | 0o700
        assert done.stdout.split() == [str(own), str(mode)], done.stderr


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


class TestGivenACompilerThatFails:
    def test_when_it_warns_before_then_the_log_has_its_first_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = tmp_path / "kernel" / "native.c"
        source.parent.mkdir()
        source.write_text(f"#warning {'long ' * 600}\nint f(void) {{ return nothing; }}\n")
        monkeypatch.setattr(native, "_sources", lambda: [source])
        monkeypatch.setattr(native, "_load_packaged", lambda: None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

        assert library.__wrapped__() is None

        message = caplog.records[-1].getMessage()
        assert f"the C compiler failed: {source}:2:" in message.splitlines()[0]
        assert "nothing" in message.splitlines()[0]

    def test_when_a_library_is_built_then_the_error_has_its_words(self, tmp_path: Path) -> None:
        with pytest.raises(subprocess.SubprocessError, match="compiler failed"):
            load_library("no-such-processor", tmp_path)
