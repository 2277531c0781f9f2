"""Engines that ours is compared with: what is installed for them."""

from pathlib import Path

from benchmarks.peers.engine_side import needs_of


class TestGivenAPackageThatWasInstalledAlone:
    def test_when_its_needs_are_read_then_torch_other_machines_and_extras_are_left_out(self, tmp_path: Path) -> None:
        info = tmp_path / "lib" / "python3.11" / "site-packages" / "some_engine-1.0.dist-info"
        info.mkdir(parents=True)
        needs = (
            "numpy>=2", 'six; python_version > "3"', 'older; python_version < "3"', 'plots; extra == "bench"',
            "torch==2.13.0", "torchvision",
        )  # fmt: skip
        lines = [
            "Metadata-Version: 2.1",
            "Name: some-engine",
            "Version: 1.0",
            *(f"Requires-Dist: {need}" for need in needs),
        ]
        (info / "METADATA").write_text("\n".join(lines))

        found = needs_of("some-engine", tmp_path / "bin" / "python")

        assert found == ["numpy>=2", 'six; python_version > "3"']
