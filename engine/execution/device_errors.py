"""Classify device errors for the engine: a step too large, a lost device, or a failed step.

Knows no torch. Errors are recognised by class name, by CUDA's number if they carry one (`error_code`, since torch 2.8),
and otherwise by CUDA's message, since errors of cuBLAS, the driver and Triton are plain RuntimeErrors. The messages are
those of the runtime (`cudaGetErrorString`) and are the same in all versions.

After most kernel errors the process's CUDA context is lost: every later call fails, and only a new process helps. Later
steps in this process must not be blamed for it.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from sluice.engine.errors import EngineBroken, EngineError, OutOfMemory

T = TypeVar("T")


class Loss(NamedTuple):
    """One kind of device loss."""

    codes: tuple[int, ...]
    """Values of `cudaError_t`."""

    words: tuple[str, ...]
    """Message fragments of the error, in lower case."""

    advice: str
    """Advice to the operator on call."""


_KERNEL_FAULT = (
    "A kernel made an illegal access; the GPU itself works. Ignore a single occurrence. If it recurs, the job that "
    "causes it fails on its own (`producer jobs list --state failed`). For a report, run with CUDA_LAUNCH_BLOCKING=1 "
    "and look for `Xid` in dmesg."
)
_HARDWARE_FAULT = (
    "The GPU is faulty. Take it out of service, look at `nvidia-smi -q -d ECC,ROW_REMAPPER` and for `Xid` in dmesg, "
    "reset it, and replace it if the error recurs."
)
_NO_GPU = (
    "The GPU does not respond or is not present. Look at `nvidia-smi` and for `Xid` in dmesg (79: it fell off the "
    "bus); the host may need a restart."
)
_DRIVER_FAULT = "The driver and the libraries do not match, or the driver is not ready: look at `nvidia-smi`."

LOSSES = (
    Loss((214, 226), ("uncorrectable ecc error", "contained error"), _HARDWARE_FAULT),
    Loss((219,), ("uncorrectable nvlink error",), _HARDWARE_FAULT),
    Loss((714,), ("hardware stack error",), _HARDWARE_FAULT),
    Loss((700,), ("an illegal memory access",), _KERNEL_FAULT),
    Loss((710,), ("device-side assert",), _KERNEL_FAULT),
    Loss((715,), ("an illegal instruction",), _KERNEL_FAULT),
    Loss((716,), ("misaligned address",), _KERNEL_FAULT),
    Loss((717,), ("operation not supported on global/shared address space",), _KERNEL_FAULT),
    Loss((718,), ("invalid program counter",), _KERNEL_FAULT),
    Loss((719,), ("unspecified launch failure",), _KERNEL_FAULT),
    Loss((721,), ("tensor memory not completely freed",), _KERNEL_FAULT),
    Loss((702,), ("the launch timed out",), _KERNEL_FAULT),
    Loss((709, 201), ("context is destroyed", "invalid device context"), _NO_GPU),
    Loss((46, 100), ("device(s) is/are busy or unavailable", "no cuda-capable device"), _NO_GPU),
    Loss((101,), ("invalid device ordinal",), _NO_GPU),
    Loss((999,), ("cuda error: unknown error", "cuda driver error: unknown error", "[cuda]: unknown error"), _NO_GPU),
    Loss((3, 4), ("cuda error: initialization error", "driver shutting down"), _DRIVER_FAULT),
    Loss((802, 803, 804), ("system not yet initialized",), _DRIVER_FAULT),
    Loss((805, 806, 807), ("mps client failed", "mps server"), _DRIVER_FAULT),
)  # fmt: skip

_NO_MEMORY_CODE = 2
_NO_MEMORY_WORDS = (
    "cuda error: out of memory",
    "cuda out of memory",  # torch's own, in the words of a process that passes it on
    "cuda driver error: out of memory",
    "triton error [cuda]: out of memory",
    "cublas_status_alloc_failed",
    "can't allocate memory",
)


def translated(error: Exception) -> Exception:
    """Translate `error`: OutOfMemory, EngineBroken with advice for the operator on call, or unchanged.

    A new exception keeps no reference to `error`, whose traceback would keep the step's tensors alive.
    """
    if isinstance(error, EngineError):
        return error
    if _lacks_memory(error):
        return OutOfMemory(_first_line(error))
    loss = loss_of(error)
    return error if loss is None else EngineBroken(f"the device is lost: {_first_line(error)}. {loss.advice}")


def loss_of(error: Exception) -> Loss | None:
    """Return the kind of device loss that `error` reports, or None."""
    if not isinstance(error, RuntimeError):
        return None
    code, said = getattr(error, "error_code", None), str(error).lower()
    return next((loss for loss in LOSSES if code in loss.codes or any(word in said for word in loss.words)), None)


def guarded(compute: Callable[[], T]) -> T:
    """Return the result of `compute`; raise its errors as `translated`, outside the frames of the failure."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - the contract: anything may come from a device
        problem = translated(error)
    raise problem


def _lacks_memory(error: Exception) -> bool:
    # By name: torch is not imported here, and its out-of-memory error is a separate class.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    is_of_device = isinstance(error, RuntimeError)
    code = getattr(error, "error_code", None)
    return is_of_device and (code == _NO_MEMORY_CODE or any(word in str(error).lower() for word in _NO_MEMORY_WORDS))


def _first_line(error: Exception) -> str:
    """Return the error's first line, without the hints that follow; the driver's log has the details."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(". ")
