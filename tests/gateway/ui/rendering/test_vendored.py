"""What is in the repository of others: uPlot, as npm has it."""

from hashlib import sha256
from pathlib import Path

import pytest

from sluice.gateway.ui import templates

VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of the files of uplot 1.6.32 on npm."""

FOLDER = Path(templates.STATIC, "vendor")


def test_when_the_folder_is_listed_then_it_has_these_files_alone() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*VENDORED}


@pytest.mark.parametrize("name", VENDORED)
def test_when_a_file_is_read_then_it_is_that_of_the_release(name: str) -> None:
    assert sha256(FOLDER.joinpath(name).read_bytes()).hexdigest() == VENDORED[name]
