"""The type checker sees every room."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


class TestGivenTheTypeChecker:
    def test_when_its_folders_are_listed_then_each_link_of_the_namespace_is_named(self) -> None:
        """Pyright does not follow a link that it meets inside a folder, and says nothing."""
        included = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["include"])

        links = {f"sluice/{path.name}" for path in (ROOT / "sluice").iterdir() if path.is_symlink()}

        assert links
        assert links <= included
