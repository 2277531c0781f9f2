"""An engine of another distribution, registered in `sluice.engines` as `other`: ours, but for what it refuses."""

import sys
from pathlib import Path

import pytest

REFUSED = {"min_p": "it has none"}

_MODULE = f"""
from dataclasses import replace

from sluice.worker.model.load import prepare as prepare_own
from sluice.worker.model.offered import features_without


def prepare(config):
    prepared = prepare_own(config)

    def load():
        BEFORE_LOADING
        loaded = prepared.load()
        own = loaded.facts.capabilities
        lean = replace(own, engine="other", refused={REFUSED!r}, features=features_without({REFUSED!r}))
        return replace(loaded, facts=replace(loaded.facts, capabilities=lean))

    return replace(prepared, load=load, description="the other engine: " + prepared.description)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, before_loading: str = "pass") -> None:
    """Install it in a folder, for this process and for those that it starts from now on.

    `before_loading` is a statement that it executes before it loads its model.
    """
    info = folder / "other_engine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-engine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sluice.engines]\nother = other_engine:prepare\n")
    (folder / "other_engine.py").write_text(_MODULE.replace("BEFORE_LOADING", before_loading))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(folder))
