"""What an error of a device means for the engine: a step too large, a device that is lost, or a failed step.

Knows no torch: its errors are told by their class's name, by CUDA's number where they carry one (`error_code`, since
torch 2.8), and by CUDA's own words where they do not: errors of cuBLAS, of the driver and of Triton are plain
RuntimeErrors. Those words are the same in all versions: they are the runtime's (`cudaGetErrorString`).

After most errors of a kernel the process's context is lost: every later call fails, and nothing but a new process
helps. Whatever runs in it then must not be blamed for it.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from engine.errors import EngineBroken, EngineError, OutOfMemory

T = TypeVar("T")


class Loss(NamedTuple):
    """One way of losing a device."""

    codes: tuple[int, ...]
    """Of `cudaError_t`."""

    words: tuple[str, ...]
    """How the error's sentence may say it, in small letters."""

    advice: str
    """For the one on call."""


_IN_A_KERNEL = (
    "A kernel did what it must not; the card itself is well. Once is an accident. If it comes again, the job that does "
    "it is found by itself (`producer jobs list --state failed`); for a report run with CUDA_LAUNCH_BLOCKING=1, and "
    "look for `Xid` in dmesg."
)
_BY_THE_CARD = (
    "The card is at fault. Take this GPU out of service, look at `nvidia-smi -q -d ECC,ROW_REMAPPER` and for `Xid` in "
    "dmesg, reset it, and have it replaced if it comes again."
)
_GONE = (
    "The card does not answer, or is not there. Look at `nvidia-smi` and for `Xid` in dmesg (79: it fell off the bus); "
    "the host may need a restart."
)
_OF_THE_DRIVER = "Driver and libraries do not go together, or the driver is not ready: look at `nvidia-smi`."

LOSSES = (
    Loss((214, 226), ("uncorrectable ecc error", "contained error"), _BY_THE_CARD),
    Loss((219,), ("uncorrectable nvlink error",), _BY_THE_CARD),
    Loss((714,), ("hardware stack error",), _BY_THE_CARD),
    Loss((700,), ("an illegal memory access",), _IN_A_KERNEL),
    Loss((710,), ("device-side assert",), _IN_A_KERNEL),
    Loss((715,), ("an illegal instruction",), _IN_A_KERNEL),
    Loss((716,), ("misaligned address",), _IN_A_KERNEL),
    Loss((717,), ("operation not supported on global/shared address space",), _IN_A_KERNEL),
    Loss((718,), ("invalid program counter",), _IN_A_KERNEL),
    Loss((719,), ("unspecified launch failure",), _IN_A_KERNEL),
    Loss((721,), ("tensor memory not completely freed",), _IN_A_KERNEL),
    Loss((702,), ("the launch timed out",), _IN_A_KERNEL),
    Loss((709, 201), ("context is destroyed", "invalid device context"), _GONE),
    Loss((46, 100), ("device(s) is/are busy or unavailable", "no cuda-capable device"), _GONE),
    Loss((101,), ("invalid device ordinal",), _GONE),
    Loss((999,), ("cuda error: unknown error", "cuda driver error: unknown error", "[cuda]: unknown error"), _GONE),
    Loss((3, 4), ("cuda error: initialization error", "driver shutting down"), _OF_THE_DRIVER),
    Loss((802, 803, 804), ("system not yet initialized",), _OF_THE_DRIVER),
    Loss((805, 806, 807), ("mps client failed", "mps server"), _OF_THE_DRIVER),
)  # fmt: skip

_NO_MEMORY_CODE = 2
_NO_MEMORY_WORDS = (
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "triton error [cuda]: out of memory",
    "cublas_status_alloc_failed",
    "can't allocate memory",
)


def told(error: Exception) -> Exception:
    """`error` as the engine knows it: OutOfMemory, EngineBroken with a sentence for the one on call, or as it is.

    What is made anew keeps nothing of `error`, whose traceback would hold the step's tensors.
    """
    if isinstance(error, EngineError):
        return error
    if _lacks_memory(error):
        return OutOfMemory(_first_line(error))
    loss = loss_of(error)
    return error if loss is None else EngineBroken(f"the device is lost: {_first_line(error)}. {loss.advice}")


def loss_of(error: Exception) -> Loss | None:
    """The way in which `error` says that the device is lost, if it does."""
    if not isinstance(error, RuntimeError):
        return None
    code, said = getattr(error, "error_code", None), str(error).lower()
    return next((loss for loss in LOSSES if code in loss.codes or any(word in said for word in loss.words)), None)


def guarded(compute: Callable[[], T]) -> T:
    """What `compute` gives; its errors as they are `told`, outside the frames of what failed."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001 - the contract: anything may come from a device
        problem = told(error)
    raise problem


def _lacks_memory(error: Exception) -> bool:
    # By name: torch is not known here, and its class is of its own.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    is_of_device = isinstance(error, RuntimeError)
    code = getattr(error, "error_code", None)
    return is_of_device and (code == _NO_MEMORY_CODE or any(word in str(error).lower() for word in _NO_MEMORY_WORDS))


def _first_line(error: Exception) -> str:
    """Its sentence without the hints that follow; what a debugger needs is in the log of the driver."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(". ")
