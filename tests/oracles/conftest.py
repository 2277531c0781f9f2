"""Native products for tests of bfloat16, on any processor."""

import pytest

from sluice.kernels.linear import cpu as linear_cpu
from sluice.kernels.native import library


@pytest.fixture
def native_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that multiplies bfloat16, whatever this one does."""
    if library() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(linear_cpu, "multiplies_bfloat16", lambda: True)
