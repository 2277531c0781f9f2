"""What a GPU's driver tells of it: NVIDIA's management library (NVML), which comes with the driver.

Called through ctypes: its Python package would be one more dependency, for one number.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from ctypes import CDLL, POINTER, Structure, byref, c_char_p, c_uint, c_void_p

_LIBRARY = "libnvidia-ml.so.1"


class _Rates(Structure):
    """`nvmlUtilization_t`: percent of the last sample period, a sixth of a second to a second."""

    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


Utilisation = Callable[[], float | None]
"""Returns the share of time in which the device ran a kernel; None if no driver tells it."""


def utilisation_of(device: str) -> Utilisation:
    """Return what reads the utilisation of a device; of a CPU, or without the library, it knows nothing."""
    if device == "cpu":
        return lambda: None
    try:
        return reader_of(CDLL(_LIBRARY), _uuid(device))
    except (OSError, AttributeError, RuntimeError):
        return lambda: None


def _uuid(device: str) -> bytes:
    """Return the name of a GPU for its driver, which counts those that are hidden from this process."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()


def reader_of(library: CDLL, uuid: bytes) -> Utilisation:
    """Return what reads the utilisation of a GPU that a loaded library of the driver may know."""
    handle, rates = c_void_p(), _Rates()
    library.nvmlDeviceGetHandleByUUID.argtypes = [c_char_p, POINTER(c_void_p)]
    library.nvmlDeviceGetUtilizationRates.argtypes = [c_void_p, POINTER(_Rates)]
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, byref(handle)):
        return lambda: None

    def read() -> float | None:
        failed = library.nvmlDeviceGetUtilizationRates(handle, byref(rates))
        return None if failed else rates.gpu / 100

    return read
