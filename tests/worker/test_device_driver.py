"""What a GPU's driver tells: through the real library where there is a GPU, else through one with the same calls."""

import subprocess
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from sluice.worker.device_driver import DeviceDriver, driver_of, utilisation_of

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
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    if (handle != (void *)0x123456789abcdef0) return 2;
    memory[0] = 80ull << 30; memory[1] = 60ull << 30; memory[2] = 20ull << 30;
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
    def test_when_it_knows_the_gpu_then_it_tells_utilisation_and_memory(self, library: CDLL) -> None:
        driver = DeviceDriver(library, b"GPU-7")
        assert driver.utilisation() == 0.93
        assert driver.memory_bytes() == (60 * 2**30, 80 * 2**30)

    def test_when_it_does_not_know_the_gpu_then_it_says_so(self, library: CDLL) -> None:
        with pytest.raises(LookupError, match="MIG-7"):
            DeviceDriver(library, b"MIG-7")


class TestGivenACpu:
    def test_when_asked_then_nothing_is_told(self) -> None:
        assert utilisation_of("cpu")() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestGivenAGpu:
    def test_when_asked_then_its_driver_tells_a_share(self) -> None:
        share = utilisation_of("cuda:0")()

        assert share is not None
        assert 0 <= share <= 1

    def test_when_asked_for_its_memory_then_the_driver_tells_what_torch_does(self) -> None:
        driver = driver_of("cuda:0")
        assert driver is not None
        memory = driver.memory_bytes()
        assert memory is not None
        assert abs(memory[0] - torch.cuda.mem_get_info(0)[0]) < 2**30
