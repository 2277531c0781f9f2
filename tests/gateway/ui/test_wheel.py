"""The page as it is installed."""

import zipfile
from pathlib import Path

import pytest

from sluice.gateway.ui.templates import HERE
from tests.kernels.test_packaged_kernels import wheel


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestGivenAWheel:
    def test_when_it_is_built_then_it_has_the_templates_and_the_static_files(self, tmp_path: Path) -> None:
        # Without a compiler, which takes a minute.
        built = zipfile.ZipFile(wheel(tmp_path / "wheel", PATH=str(tmp_path)))

        files = [path for name in ("templates", "static") for path in (HERE / name).rglob("*") if path.is_file()]
        place = "sluice/gateway/ui"
        packaged = {path: built.read(f"{place}/{path.relative_to(HERE)}") for path in files}
        assert len(files) > 20
        assert packaged == {path: path.read_bytes() for path in files}
