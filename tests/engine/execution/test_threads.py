"""Threads that spin only for a moment: limited before torch is imported, and not against what the operator has set."""

import os
import sys
from types import ModuleType

import pytest

from sluice.engine.execution.threads import SPINS, limit_spinning

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have neither the variables nor torch, and put both back afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "to be removed")  # so that what the function sets is removed too
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


class TestGivenVariablesThatAreNotSet:
    def test_when_torch_is_not_imported_then_spinning_is_limited(self) -> None:
        assert limit_spinning()
        assert os.environ["GOMP_SPINCOUNT"] == SPINS

    def test_when_torch_is_imported_then_it_says_that_it_is_too_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))

        assert not limit_spinning()


class TestGivenAVariableOfTheOperator:
    @pytest.mark.parametrize("name", VARIABLES)
    def test_when_it_is_set_then_nothing_is_changed(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, "active")

        limit_spinning()

        assert {key: os.environ.get(key) for key in VARIABLES} == dict.fromkeys(VARIABLES) | {name: "active"}
