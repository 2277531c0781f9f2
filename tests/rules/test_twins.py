"""Blocking modules are generated from their asyncio twins."""

import pytest

from tools.blocking import ROOT, TWINS, twin_of


@pytest.mark.parametrize("source", TWINS)
def test_when_an_asyncio_module_is_read_then_its_twin_is_as_generated(source: str) -> None:
    written = (ROOT / TWINS[source]).read_text()

    assert written == twin_of(source), "run `python -m tools.blocking` to write it"
