"""Each CPU kernel test runs on every path that this machine has: torch, and native for several instruction sets."""

from collections.abc import Callable
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from tempfile import gettempdir

import pytest

from sluice.kernels import tiles
from sluice.kernels.experts import cpu as experts_cpu
from sluice.kernels.gated_activation import cpu as gated_activation_cpu
from sluice.kernels.linear import native as linear_native
from sluice.kernels.native import declare, load_library
from sluice.kernels.paged_attention import cpu as paged_attention_cpu
from sluice.kernels.rms_norm import cpu as rms_norm_cpu
from sluice.kernels.sample import cpu as sample_cpu
from sluice.kernels.soft_cap import cpu as soft_cap_cpu
from sluice.kernels.write_kv import cpu as write_kv_cpu

MODULES = (
    tiles,
    linear_native,
    experts_cpu,
    gated_activation_cpu,
    paged_attention_cpu,
    rms_norm_cpu,
    sample_cpu,
    soft_cap_cpu,
    write_kv_cpu,
)

NEEDED_FLAGS = {
    "x86-64-v3": "avx2",
    "x86-64-v4": "avx512vl",
    "cooperlake": "avx512_bf16",
}
"""Instruction sets to build for, besides this machine's own, and what a processor needs to run them."""


@cache
def _native(march: str, name: str, arguments: str) -> Callable[..., None]:
    folder = Path(gettempdir()) / "sluice-test-kernels"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # Of the test processes, one builds and the others wait.
        flock(lock, LOCK_EX)
        # This machine's own library is that of every worker here.
        library = load_library(march, None if march == "native" else folder)
    return declare(library, name, arguments)


def _no_native(_name: str, _arguments: str) -> None:
    return None


FEATURES = Path("/proc/cpuinfo").read_text().split()

FAST = ("x86-64-v3",) if "avx512f" in FEATURES else ()
"""Without AVX-512, this machine's own instruction set takes the branches of the sources that x86-64-v3 takes."""

OTHERS = [pytest.param(march, marks=() if march in FAST else pytest.mark.long) for march in NEEDED_FLAGS]
"""The fast suite has this machine's own instruction set, and the oldest one where it differs; builds take seconds."""


@pytest.fixture(params=["torch", "native", *OTHERS])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path that the kernels take in this test."""
    return _take(request.param, monkeypatch)


@pytest.fixture(params=["native", *OTHERS])
def native_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As `path`, for what only a library can do."""
    return _take(request.param, monkeypatch)


def _take(march: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if march in NEEDED_FLAGS and NEEDED_FLAGS[march] not in FEATURES:
        pytest.skip(f"this processor has no {NEEDED_FLAGS[march]}")

    def native_function(name: str, arguments: str) -> Callable[..., None]:
        return _native(march, name, arguments)

    tiles.may_use_tiles.cache_clear()
    for module in MODULES:
        monkeypatch.setattr(module, "native_function", _no_native if march == "torch" else native_function)
    return march
