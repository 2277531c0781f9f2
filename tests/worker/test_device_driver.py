"""What a GPU's driver tells: through the real library where there is a GPU, else through one with the same calls."""

import subprocess
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from sluice.worker.device_driver import reader_of, utilisation_of

LIBRARY = """
#include <string.h>
static int is_ready;
int nvmlInit_v2(void) { is_ready = 1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (!is_ready || strcmp(uuid, "GPU-7")) return 6;
    *handle = (void *)0x123456789abcdef0;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    if (handle != (void *)0x123456789abcdef0) return 2;
    rates[0] = 93; rates[1] = 12;
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    """A library with the calls of NVML, which knows one GPU."""
    folder: Path = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(LIBRARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "nvml.so", folder / "nvml.c"], check=True)
    return CDLL(str(folder / "nvml.so"))


class TestGivenALibraryOfTheDriver:
    def test_when_it_knows_the_gpu_then_its_utilisation_is_a_share(self, library: CDLL) -> None:
        assert reader_of(library, b"GPU-7")() == 0.93

    def test_when_it_does_not_know_the_gpu_then_nothing_is_told(self, library: CDLL) -> None:
        assert reader_of(library, b"MIG-7")() is None


class TestGivenACpu:
    def test_when_asked_then_nothing_is_told(self) -> None:
        assert utilisation_of("cpu")() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGivenAGpu:
    def test_when_asked_then_its_driver_tells_a_share(self) -> None:
        share = utilisation_of("cuda:0")()

        assert share is not None
        assert 0 <= share <= 1
