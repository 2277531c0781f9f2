"""Values that a GPU's driver reports, by NVIDIA's management library (NVML), which comes with the driver.

Called through ctypes: its Python package would be one more dependency, for two numbers.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_uint, c_ulonglong, c_void_p

_LIBRARY = "libnvidia-ml.so.1"


class _Rates(Structure):
    """`nvmlUtilization_t`: percent of the last sample period, a sixth of a second to a second."""

    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class _Memory(Structure):
    """`nvmlMemory_t`: bytes."""

    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


Utilisation = Callable[[], float | None]
"""Returns the share of time in which the device ran a kernel; None if no driver reports it."""


class DeviceDriver:
    """A GPU as its driver knows it. Unlike torch's, its answers need no context on the GPU, which takes memory."""

    def __init__(self, library: CDLL, uuid: bytes) -> None:
        """Look for a GPU in a loaded library of the driver.

        Raises:
            LookupError: the driver does not know it.
        """
        self._library, self._handle = library, c_void_p()
        library.nvmlDeviceGetHandleByUUID.argtypes = [c_char_p, POINTER(c_void_p)]
        library.nvmlDeviceGetUtilizationRates.argtypes = [c_void_p, POINTER(_Rates)]
        library.nvmlDeviceGetMemoryInfo.argtypes = [c_void_p, POINTER(_Memory)]
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, byref(self._handle)):
            raise LookupError(f"the driver does not know {uuid.decode()}")

    def utilisation(self) -> float | None:
        """Return the share of time in which it ran a kernel; None if the driver does not report it."""
        rates = _Rates()
        failed = self._library.nvmlDeviceGetUtilizationRates(self._handle, byref(rates))
        return None if failed else rates.gpu / 100

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return its free and all its memory; None if the driver does not report it."""
        memory = _Memory()
        failed = self._library.nvmlDeviceGetMemoryInfo(self._handle, byref(memory))
        return None if failed else (memory.free, memory.total)


def driver_of(device: str) -> DeviceDriver | None:
    """Return the driver's view of a device; None of a CPU, or without the library."""
    if device == "cpu":
        return None
    import torch

    try:
        # By its name: the driver also counts GPUs that are hidden from this process.
        return DeviceDriver(CDLL(_LIBRARY), f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
    except (OSError, AttributeError, RuntimeError, LookupError):
        return None


def utilisation_of(device: str) -> Utilisation:
    """Return a function that reads the utilisation of a device; it returns None for a CPU, or without the library."""
    driver = driver_of(device)
    return driver.utilisation if driver is not None else lambda: None
