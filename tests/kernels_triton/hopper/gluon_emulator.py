"""Run kernels in Gluon on the CPU: their source, with torch's operators for Gluon's. Triton's interpreter does not.

What is asynchronous on the device happens as late as it may: a copy into shared memory is NaN until its barrier is
waited for, and a product reads its operands when it is waited for. Each group of warps is a thread, one of which runs
at a time, until it uses a barrier. So a missing wait, an early release and a deadlock become wrong results or errors.
Layouts, registers and the compiler are not tested here: `test_compiled_kernels.py` and a GPU do that.
"""

# Neither Triton's objects nor what stands in for them has types.
# pyright: basic

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

COPYING_THREADS = 128


class Deadlock(AssertionError):
    """All groups of warps wait."""


class Pointer:
    """Addresses in the memory of a tensor."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self._memory = memory
        self._offset = offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self._memory, self._offset + offset)

    def load(self, mask: Any = None, other: Any = 0) -> Tensor:
        """Read where `mask` is true; an address outside of the memory is an error."""
        offset = torch.as_tensor(self._offset)
        if mask is None:
            return self._memory[offset]
        offset, mask = torch.broadcast_tensors(offset, torch.as_tensor(mask))
        found = torch.full(offset.shape, other, dtype=self._memory.dtype)
        found[mask] = self._memory[offset[mask]]
        return found

    def store(self, value: Tensor, mask: Tensor) -> None:
        """Write where `mask` is true."""
        offset, value, mask = torch.broadcast_tensors(self._offset, value, mask)
        self._memory[offset[mask]] = value[mask]


def pointer_to(tensor: Tensor) -> Pointer:
    """The address of a tensor's first element, in the memory that it is a view of."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return Pointer(torch.as_strided(tensor, (size,), (1,), 0), tensor.storage_offset())


class Barrier:
    """A barrier in shared memory: a phase ends when as many have arrived as it was made for."""

    def __init__(self) -> None:
        self._count = self._missing = 0
        self._copies: list[tuple[Shared, Tensor]] = []
        self.phase = 0

    def expect(self, count: int) -> None:
        self._count = self._missing = count

    def arrive(self, count: int) -> None:
        self._missing -= count
        assert self._missing >= 0
        if self._missing == 0:
            self.phase, self._missing = self.phase + 1, self._count

    def arrive_later(self, copies: Sequence[tuple["Shared", Tensor]]) -> None:
        self._copies += copies

    def land(self) -> None:
        """Let what is on its way arrive."""
        if self._copies:
            for tile, value in self._copies:
                tile.store(value)
            self._copies.clear()
            self.arrive(COPYING_THREADS)


class Shared:
    """A tile, or several, in shared memory: NaN until written."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.dtype = data.dtype

    def index(self, at: Any) -> "Shared":
        return Shared(self.data[int(at)])

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.data[start : start + length])

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, _layout: Any) -> Tensor:
        return self.data.clone()


class Product:
    """A product that may not have been computed: it reads what is in shared memory when it is."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self._operands = (a, b, acc, use_acc)
        self._result: Tensor | None = None

    def result(self) -> Tensor:
        if self._result is None:
            self._result = self._computed()
        return self._result

    def _computed(self) -> Tensor:
        a, b, acc, use_acc = self._operands
        product = (a.data if isinstance(a, Shared) else a).float() @ b.data.float()
        return product + acc if use_acc else product


class Groups:
    """Groups of warps that take turns: one runs until it must wait."""

    def __init__(self, functions: Sequence[Callable[[], object]], order: Sequence[int]) -> None:
        self._functions = functions
        self._order = order
        self._turn = threading.Condition()
        self._running: int | None = None
        self._conditions: dict[int, Callable[[], bool]] = {number: lambda: True for number in order}
        self._error: BaseException | None = None
        self.local = threading.local()

    def run(self) -> None:
        threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in self._order]
        for thread in threads:
            thread.start()
        with self._turn:
            self._pass_on()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let others run until `condition` holds."""
        number = self.local.number
        with self._turn:
            self._conditions[number] = condition
            self._pass_on()
            self._await_turn(number)

    def _run(self, number: int) -> None:
        self.local.number, self.local.copies, self.local.products = number, [], []
        try:
            with self._turn:
                self._await_turn(number)
            self._functions[number]()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that runs all
            self._error = self._error or error
        with self._turn:
            del self._conditions[number]
            self._pass_on()

    def _await_turn(self, number: int) -> None:
        self._turn.wait_for(lambda: self._running == number or self._error is not None)
        if self._error is not None:
            raise self._error

    def _pass_on(self) -> None:
        ready = [number for number in self._order if number in self._conditions and self._conditions[number]()]
        if not ready and self._conditions and self._error is None:
            self._error = Deadlock(f"groups {sorted(self._conditions)} wait for each other")
        self._running = ready[0] if ready else None
        self._turn.notify_all()


class Program:
    """One program of a grid: what stands in for the modules that a kernel in Gluon uses."""

    def __init__(self, ids: Sequence[int], grid: Sequence[int], order: Sequence[int]) -> None:
        self._groups: Groups | None = None
        self._order = order
        self.names: dict[str, object] = {
            "gl": self._language(ids, grid),
            "tl": self._language(ids, grid),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: barrier.data[0].expect(count),
                wait=self._wait,
                arrive=self._arrive,
            ),
            "async_copy": SimpleNamespace(async_copy_global_to_shared=self._copy, mbarrier_arrive=self._arrive_copied),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_products,
            "fence_async_shared": lambda: None,
        }

    def _language(self, ids: Sequence[int], grid: Sequence[int]) -> SimpleNamespace:
        return SimpleNamespace(
            program_id=lambda axis: torch.tensor(ids[axis]),
            num_programs=lambda axis: grid[axis],
            arange=lambda start, end, _layout=None: torch.arange(start, end),
            full=lambda shape, value, dtype, _layout: torch.full([int(size) for size in shape], value, dtype=dtype),
            load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
            store=lambda pointer, value, mask: pointer.store(value, mask),
            where=torch.where,
            minimum=lambda a, b: torch.minimum(*map(torch.as_tensor, (a, b))),
            maximum=lambda a, b: torch.maximum(*map(torch.as_tensor, (a, b))),
            max=lambda x, axis: x.amax(dim=axis),
            sum=lambda x, axis: x.sum(dim=axis),
            exp2=torch.exp2,
            convert_layout=lambda x, _layout: x,
            static_range=range,
            SliceLayout=lambda *_: None,
            NVMMASharedLayout=lambda **_: None,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialise,
            float32=torch.float32,
            int64=torch.int64,
        )

    def _allocate(self, dtype: torch.dtype, shape: Sequence[int], _layout: object) -> Any:
        if dtype != torch.int64:
            return Shared(torch.full([int(size) for size in shape], float("nan"), dtype=dtype))
        barriers = [Barrier() for _ in range(int(shape[0]))]
        return SimpleNamespace(index=lambda at: SimpleNamespace(data=[barriers[int(at)]]))

    def _specialise(self, functions: Sequence[tuple[Callable[..., object], tuple[Any, ...]]], *_: object) -> None:
        self._groups = Groups([lambda f=f, a=a: f(*a) for f, a in functions], self._order)
        self._groups.run()

    def _wait(self, barrier: Any, parity: Any) -> None:
        assert self._groups is not None

        def is_over() -> bool:
            barrier.data[0].land()
            return barrier.data[0].phase % 2 != int(parity)

        self._groups.wait_until(is_over)

    def _arrive(self, barrier: Any, *, count: int) -> None:
        assert self._groups is not None
        barrier.data[0].arrive(count)
        self._groups.wait_until(lambda: True)

    def _copy(self, tile: Shared, pointer: Pointer, mask: Tensor) -> None:
        assert self._groups is not None
        tile.data.fill_(float("nan"))
        self._groups.local.copies.append((tile, pointer.load(mask)))

    def _arrive_copied(self, barrier: Any, *, increment_count: bool) -> None:
        assert self._groups is not None
        assert not increment_count
        barrier.data[0].arrive_later(self._groups.local.copies)
        self._groups.local.copies = []

    def _multiply(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        assert self._groups is not None
        product = Product(a, b, acc, use_acc)
        self._groups.local.products.append(product)
        return product if is_async else self._wait_products(0, (product,))

    def _wait_products(self, num_pending: int, deps: tuple[Product]) -> Tensor:
        assert self._groups is not None
        pending = self._groups.local.products
        while len(pending) > num_pending:
            pending.pop(0).result()
        assert deps[0] not in pending, "used before it was waited for"
        return deps[0].result()


def emulate(kernel: Any, grid: Sequence[int], arguments: Mapping[str, Any], order: Sequence[int]) -> None:
    """Run all programs of a launch; of a program's groups that can run, the first in `order` does."""
    values = {name: pointer_to(v) if isinstance(v, Tensor) else v for name, v in arguments.items()}
    for ids in itertools.product(*map(range, grid)):
        function = _rebound(kernel.fn, Program(ids, grid, order).names, {})
        function(**values)


def _rebound(function: FunctionType, names: Mapping[str, object], made: dict[Any, FunctionType]) -> FunctionType:
    """Copy a function, and those that it calls, with `names` and plain values in place of Triton's."""
    scope: dict[str, object] = {}
    copied = made[function] = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    for name, value in function.__globals__.items():
        if name in names:
            scope[name] = names[name]
        elif isinstance(value, JITFunction):
            scope[name] = made[value.fn] if value.fn in made else _rebound(value.fn, names, made)
        else:
            scope[name] = getattr(value, "value", value)
    return copied
