"""docs/reference/scripts.md agrees with the headers of the scripts, and these with the page of keys."""

import re

import pytest

from tests.end_to_end.processes import ROOT
from tools.scripts_page import NAMES, PAGE, header_of, page

DESCRIBED = set(re.findall(r"`P:(\w+)", (ROOT / "docs/reference/keys.md").read_text()))


class TestGivenTheHeadersOfTheScripts:
    def test_when_one_is_changed_then_the_page_has_it(self) -> None:
        written = PAGE.read_text()

        assert written == page(written), "run `python -m tools.scripts_page` to write the page"

    @pytest.mark.parametrize("name", NAMES)
    def test_when_one_names_keys_then_the_page_of_keys_describes_them(self, name: str) -> None:
        header = header_of(name)

        # Format 1 had the same names.
        named = {key.removeprefix("1:") for key in header.reads | header.writes}

        assert named - DESCRIBED == set()
