"""Compile what a launcher launches, for a GPU that is not there, and read what the compiler made of it."""

# triton's language is not typable.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY_BYTES = 227 * 1024
"""Most that one block may have on sm_90."""

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """The outcome of one launch."""

    name: str
    registers: int
    stack_bytes: int
    """Registers that did not fit, spilled to memory."""

    shared_bytes: int
    ptx: str
    grid: tuple[int, ...]
    cubin: bytes = field(repr=False)


class CompileInstead(AbstractContextManager[list[Compiled]]):
    """While it is open, every launch of a kernel is compiled for Hopper and not run; gives what was compiled."""

    def __init__(self) -> None:
        self._compiled: list[Compiled] = []
        self._run = JITFunction.run

    def __enter__(self) -> list[Compiled]:
        compiled = self._compiled

        def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:  # triton's own
            compiled.append(_compile(kernel, args, options, grid))

        JITFunction.run = cast("Callable[..., Any]", compile_launch)
        return compiled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        JITFunction.run = self._run


def _compile(kernel: Any, args: tuple[Any, ...], named: dict[str, Any], grid: Any) -> Compiled:  # triton's own types
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, args, strict=False)) | {name: v for name, v in named.items() if name in names}
    options = {name: v for name, v in named.items() if name not in names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    hints: dict[tuple[int], list[list[object]]] = {}
    for index, parameter in enumerate(kernel.params):
        kind, is_divisible = _specialise(values[parameter.name], parameter)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = values[parameter.name]
        if is_divisible:
            hints[(index,)] = [["tt.divisibility", 16]]
    make_source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make_source(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    built = triton.compile(source, target=HOPPER, options=options)
    registers, stack_bytes = _usage(built.asm["cubin"])
    return Compiled(
        kernel.__name__,
        registers,
        stack_bytes,
        built.metadata.shared,
        built.asm["ptx"],
        tuple(grid),
        built.asm["cubin"],
    )


def _specialise(value: object, parameter: Any) -> tuple[str, bool]:  # triton's own type
    """The type of an argument as the launcher would have it, and whether it is known to be a multiple of 16."""
    if parameter.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype], True
    if isinstance(value, float):
        return "fp32", False
    assert isinstance(value, int)
    if parameter.do_not_specialize:
        return "i32", False
    return ("constexpr", False) if value == 1 else ("i32" if value < 2**31 else "i64", value % 16 == 0)


def _usage(cubin: bytes) -> tuple[int, int]:
    text = dump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def dump(cubin: bytes, option: str) -> str:
    """Return what CUDA's tool tells about machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
