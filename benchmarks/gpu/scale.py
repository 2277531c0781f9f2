"""Scale of `benchmarks gpu`: device, timer, limits, and sizes for a GPU or for a toy run."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]

BEYOND_CACHE_BYTES = 2**28
"""More than four times the L2 of any card."""

MAX_INPUTS = 64
"""A call on less than some MB is bound by its launch."""


class CudaTimer:
    """A timer of calls as the GPU sees them: many of them in one CUDA graph, without launch overhead."""

    def device_us(self, call: Call, *, repeats: int = 7, graph_us: float = 4000) -> float:
        """Return the median time of one call, in microseconds, back to back with itself."""
        for _ in range(3):
            call()
        roughly_us = max(self._events_us(call, 3) / 3, 1.0)
        num_calls = max(1, min(200, int(graph_us / roughly_us)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(num_calls):
                call()
        graph.replay()
        return statistics.median(self._events_us(graph.replay, 1) for _ in range(repeats)) / num_calls

    def eager_us(self, call: Call, *, repeats: int = 20) -> float:
        """Return the time of one call as Python launches it: the longer of launching and computing."""
        for _ in range(3):
            call()
        return self._events_us(call, repeats) / repeats

    def host_us(self, call: Call, *, repeats: int = 50) -> float:
        """Return the time that Python needs for one call."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(repeats):
            call()
        spent_s = time.perf_counter() - began_s
        torch.cuda.synchronize()
        return spent_s / repeats * 1e6

    def _events_us(self, call: Call, repeats: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


class CpuTimer:
    """The same timers on a device where a call has ended when it returns; one call each."""

    def device_us(self, call: Call) -> float:
        """Return the time of one call, in microseconds."""
        began_s = time.perf_counter()
        call()
        return (time.perf_counter() - began_s) * 1e6

    eager_us = device_us
    host_us = device_us


Timer = CudaTimer | CpuTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Device and sizes: a GPU, or a toy that the interpreter can afford."""

    device: torch.device
    timer: Timer
    is_toy: bool
    dtypes: Sequence[torch.dtype]
    """Dtypes that the kernels are checked in."""

    dtype: torch.dtype
    """The dtype that speed is measured in."""

    known_rates: dict[str, float] = field(default_factory=dict[str, float])
    """`copy` in bytes a second and `product` in operations a second, if they are measured."""

    def pick(self, card: Sequence[int], toy: Sequence[int]) -> Sequence[int]:
        """Return one list of sizes for the GPU, another for the toy."""
        return toy if self.is_toy else card

    def in_turn_us(self, make: Callable[[], Call], num_bytes: int) -> float:
        """Return the time of one call, over enough inputs in turn that the device's cache holds none of them.

        Args:
            make: creates inputs, and returns the call that reads them.
            num_bytes: the bytes that a call reads and writes.
        """
        num_inputs = 1 if self.is_toy else max(1, min(MAX_INPUTS, BEYOND_CACHE_BYTES // num_bytes))
        calls = [make() for _ in range(num_inputs)]
        return self.timer.device_us(lambda: [call() for call in calls]) / num_inputs

    def copies(self) -> dict[str, float]:
        """Return bytes per second of each way to copy, reads and writes counted."""
        size = 2**13 if self.is_toy else 2**30
        source = torch.randn(size, device=self.device).to(self.dtype)
        target = torch.empty_like(source)

        def rate(us: float) -> float:
            return 2 * source.nbytes / us * 1e6

        return {
            "copy_": rate(self.timer.eager_us(lambda: target.copy_(source))),
            "copy_ in a graph": rate(self.timer.device_us(lambda: target.copy_(source))),
            "kernel": rate(self.timer.device_us(lambda: torch.add(source, 0, out=target))),
        }

    def copy_rate(self) -> float:
        """Bytes per second of the fastest copy; measured once. A copy by the copy engine is not: it is slower."""
        if "copy" not in self.known_rates:
            self.known_rates["copy"] = max(self.copies().values())
        return self.known_rates["copy"]

    def product_rate(self) -> float:
        """Operations per second of a square product of random numbers (zeros would be faster); measured once."""
        if "product" not in self.known_rates:
            size = 64 if self.is_toy else 8192
            a, b = (torch.randn(size, size, device=self.device).to(self.dtype) for _ in "ab")
            out = torch.empty_like(a)
            self.known_rates["product"] = 2 * size**3 / self.timer.device_us(lambda: torch.mm(a, b, out=out)) * 1e6
        return self.known_rates["product"]

    def rates(self, us: float, *, num_bytes: int = 0, num_flops: int = 0) -> dict[str, float | str]:
        """Return a time with its bytes and operations, as rates and as fractions of the device's own."""
        figures: dict[str, float | str] = {"us": us}
        if num_bytes:
            rate = num_bytes / us * 1e6
            figures |= {"MB": num_bytes / 1e6, "GB/s": rate / 1e9, "of copy": rate / self.copy_rate()}
        if num_flops:
            rate = num_flops / us * 1e6
            figures |= {"GFLOP": num_flops / 1e9, "TFLOP/s": rate / 1e12, "of product": rate / self.product_rate()}
        return figures


def card_scale(known_rates: dict[str, float] | None = None) -> Scale:
    """Return the CUDA device, at full size; most important dtypes first."""
    return Scale(
        device=torch.device("cuda"),
        timer=CudaTimer(),
        is_toy=False,
        dtypes=[torch.bfloat16, torch.float16, torch.float32],
        dtype=torch.bfloat16,
        known_rates=known_rates or {},
    )


def toy_scale() -> Scale:
    """Return the CPU, interpreted; without bfloat16, which the interpreter gets wrong."""
    dtypes = [torch.float32, torch.float16]
    return Scale(device=torch.device("cpu"), timer=CpuTimer(), is_toy=True, dtypes=dtypes, dtype=torch.float32)
