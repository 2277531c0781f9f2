"""Weights in FP8 (e4m3) with a scale for a tensor, for each row, or for each block: only a GPU may multiply them so.

`quant_method` fp8, as DeepSeek and Qwen publish it: `weight` `[N, K]` in FP8 and `weight_scale_inv`, a number for each
block, by which it is multiplied.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.quantized.fields import choice, listed
from sluice.engine.quantized.matrix import CodedRows, StoredMatrix
from sluice.engine.quantized.source import FLOATS, Source, check_shapes, form_required
from sluice.engine.text.json_files import Json
from sluice.kernels.linear.float8 import FLOAT8, SPAN


@dataclass(frozen=True, slots=True)
class Float8:
    """Matrices in FP8, in blocks."""

    block: tuple[int, int]

    @property
    def description(self) -> str:
        """See `Format`."""
        return f"FP8 in blocks of {self.block[0]} x {self.block[1]}"

    def matrix(self, source: Source, module: str) -> StoredMatrix | None:
        """See `Format`."""
        return float8_matrix(source, module, f"{module}.weight_scale_inv", self.block, rounds_rows=True)


def float8_matrix(
    source: Source, module: str, scale: str, block: tuple[int, int] | None, *, rounds_rows: bool
) -> StoredMatrix | None:
    """Return the matrix of a module in FP8; None if it is not in FP8.

    Args:
        source: of its tensors.
        module: its name.
        scale: name of its scales: for each `block` if it is given; else one, or one for each row.
        block: N and K of a block.
        rounds_rows: whether its products have rows in FP8.
    """
    name = f"{module}.weight"
    form = source.form_of(name)
    if form is None or form[0] != FLOAT8:
        return None
    num_rows, in_size = form_required(source, name, (FLOAT8,))
    rows_of_scale, span = block or (_rows_of_scale(source, scale, num_rows), in_size)
    if block is not None:
        form_required(source, scale, FLOATS)
        check_shapes(source, {scale: (-(-num_rows // block[0]), -(-in_size // block[1]))})
    return StoredMatrix(
        shape=(num_rows, in_size),
        num_bits=8,
        span=span,
        rows=lambda rows: CodedRows(
            codes=source.stored(name)[rows], scales=scales_of_rows(source.stored(scale), rows, rows_of_scale)
        ),
        product="none",
        reason="in FP8",
        is_float8=rounds_rows and span in (SPAN, in_size),
    )


def scales_of_rows(scales: Tensor, rows: slice, rows_of_scale: int) -> Tensor:
    """Return a scale for each of some rows `[n, spans]`, of which `rows_of_scale` share one."""
    table = scales.float().reshape(-1, 1) if scales.dim() < 2 else scales.float()
    return table[torch.arange(rows.start, rows.stop) // rows_of_scale]


def _rows_of_scale(source: Source, name: str, num_rows: int) -> int:
    """Return how many rows share a scale: all, or each has one."""
    form = source.form_of(name)
    shape = None if form is None or form[0] not in FLOATS else form[1]
    if shape in ((), (1,), (1, 1)):
        return num_rows
    if shape in ((num_rows,), (num_rows, 1)):
        return 1
    found = "missing" if form is None else str(form)
    raise ModelFolderError(f"tensor {name!r} is {found}, expected one number, or one for each of {num_rows} rows.")


def float8_of(config: Json) -> Float8:
    """Return the format that a quantization_config of fp8 states.

    Raises:
        ModelFolderError: it states what is not supported.
    """
    choice(config, "fmt", ("e4m3",), "e4m3")
    return Float8(block_of(config, "weight_block_size"))


def block_of(config: Json, name: str) -> tuple[int, int]:
    """Return N and K of a block, of which rows are read in whole blocks."""
    sizes = listed(config, name) or [128, 128]
    is_right = len(sizes) == 2 and all(isinstance(size, int) and size in range(1, 2**16) for size in sizes)
    if not is_right:
        raise ModelFolderError(f"quantization_config: {name} must be two whole numbers above 0, got {sizes!r}.")
    return cast("tuple[int, int]", tuple(sizes))
