"""Errors of a device, classified by type, number and words, as torch 2.11 to 2.13, cuBLAS and Triton raise them."""

import gc
import weakref

import pytest
import torch

from sluice.engine.errors import EngineBroken, OutOfMemory
from sluice.engine.execution.device_errors import LOSSES, guarded, loss_of, translated

HINTS = (
    "\nSearch for `cudaError' in https://docs.nvidia.com/ for more information.\nCUDA kernel errors might be late.\n"
)
BY_WORDS = [
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: misaligned address",
    "CUDA error: unspecified launch failure",
    "CUDA driver error: unspecified launch failure",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: unknown error",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "Triton Error [CUDA]: device-side assert triggered",
]


class AcceleratorError(RuntimeError):
    """As torch's, of which only C++ sets the number."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


class TestGivenErrorsOfALostDevice:
    @pytest.mark.parametrize("message", BY_WORDS)
    @pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
    def test_when_recognised_by_message_then_the_engine_is_broken_and_says_what_to_do(
        self, message: str, kind: type[RuntimeError]
    ) -> None:
        problem = translated(kind(message + HINTS))

        assert isinstance(problem, EngineBroken)
        assert str(problem).startswith(f"the device is lost: {kind.__name__}: {message}. ")
        assert "\n" not in str(problem)

    @pytest.mark.parametrize("code", [code for loss in LOSSES for code in loss.codes])
    def test_when_recognised_by_their_number_then_words_are_not_needed(self, code: int) -> None:
        assert isinstance(translated(AcceleratorError("CUDA error: in words of a later version", code)), EngineBroken)

    def test_when_two_ways_are_compared_then_no_number_stands_for_both(self) -> None:
        codes = [code for loss in LOSSES for code in loss.codes]

        assert len(codes) == len(set(codes))

    @pytest.mark.parametrize(
        ("message", "to_do"),
        [
            ("CUDA error: uncorrectable ECC error encountered", "Take it out of service"),
            ("CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING=1"),
            ("CUDA error: no CUDA-capable device is detected", "fell off the bus"),
        ],
    )
    def test_when_the_cause_is_known_then_it_is_named(self, message: str, to_do: str) -> None:
        assert to_do in str(translated(RuntimeError(message)))


class TestGivenErrorsForLackOfMemory:
    @pytest.mark.parametrize(
        "error",
        [
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB." + HINTS),
            torch.OutOfMemoryError("HIP out of memory."),
            AcceleratorError("CUDA error: out of memory", 2),
            RuntimeError("CUDA error: out of memory" + HINTS),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            RuntimeError("Triton Error [CUDA]: out of memory"),
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
            MemoryError(),
        ],
        ids=lambda error: str(error)[:30],
    )
    def test_when_classified_then_no_request_is_to_blame(self, error: Exception) -> None:
        assert isinstance(translated(error), OutOfMemory)

    def test_when_raised_again_then_what_the_step_held_is_free(self) -> None:
        held: list[weakref.ref[torch.Tensor]] = []

        def compute() -> None:
            activations = torch.zeros(8)
            held.append(weakref.ref(activations))
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        with pytest.raises(OutOfMemory) as caught:
            guarded(compute)

        gc.collect()
        assert held[0]() is None
        assert caught.value.__context__ is None


class TestGivenOtherErrors:
    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
            RuntimeError("CUDA error: invalid configuration argument"),
            RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
            AcceleratorError("CUDA error: invalid argument", 1),
            ValueError("an illegal memory access is spoken of by a person"),
            OSError("Input/output error"),
            EngineBroken("earlier"),
            OutOfMemory("earlier"),
        ],
        ids=lambda error: str(error)[:30],
    )
    def test_when_classified_then_they_stay_as_they_are(self, error: Exception) -> None:
        assert translated(error) is error

    def test_when_nothing_goes_wrong_then_nothing_is_changed(self) -> None:
        assert guarded(lambda: 7) == 7
        assert loss_of(RuntimeError("CUDA error: invalid argument")) is None
