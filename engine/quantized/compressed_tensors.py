"""The formats of compressed-tensors: matrices of 4 and 8 bits in words (`pack-quantized`), in int8, and in FP8.

Of a matrix `[N, K]`: `weight_packed` `[N, K * bits / 32]` int32, codes plus half of their range; or `weight` in int8 or
FP8. `weight_scale` is a number, `[N, 1]`, or `[N, K / g]`; `weight_zero_point`, if it is not symmetric, like it: in
words along N if codes are packed. The tensors say which of these it is; the config has the blocks of FP8, and whether
rows of x are rounded to 8 bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.quantized.fields import objects, optional
from sluice.engine.quantized.float8 import block_of, float8_matrix
from sluice.engine.quantized.matrix import CodedRows, StoredMatrix, product_of
from sluice.engine.quantized.source import FLOATS, Form, Source, check_shapes, form_required, order_of
from sluice.engine.quantized.words import codes_of, signed
from sluice.engine.text.json_files import Json

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_ROUNDED_BITS = 8
_INT8_STEP = 64
"""Rows of the product of int8 are of whole steps of this size."""


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Matrices in the formats of compressed-tensors."""

    description: str
    block: tuple[int, int] | None
    """Of FP8."""

    rounds_rows: bool
    """Whether the products of matrices in int8 have rows in int8, and those of FP8 in FP8."""

    def matrix(self, source: Source, module: str) -> StoredMatrix | None:
        """See `Format`."""
        if source.form_of(f"{module}.weight_packed") is not None:
            return _packed(source, module)
        form = source.form_of(f"{module}.weight")
        if form is not None and form[0] == torch.int8:
            return self._in_int8(source, module)
        scale = f"{module}.weight_scale"
        block = self._block_of(form, source.form_of(scale))
        return float8_matrix(source, module, scale, block, rounds_rows=self.rounds_rows)

    def _block_of(self, weight: Form | None, scale: Form | None) -> tuple[int, int] | None:
        """Return the block of a matrix in FP8; None if its scales are not of blocks."""
        if self.block is None or weight is None or scale is None or len(weight[1]) != len(self.block):
            return None
        blocks = tuple(-(-size // each) for size, each in zip(weight[1], self.block, strict=True))
        return self.block if scale[1] == blocks else None

    def _in_int8(self, source: Source, module: str) -> StoredMatrix:
        name = f"{module}.weight"
        num_rows, in_size = form_required(source, name, (torch.int8,))
        span = _span(source, module, num_rows, in_size)
        zero = f"{module}.weight_zero_point"
        has_zeros = source.form_of(zero) is not None
        product, reason = product_of(span, in_size)
        if self.rounds_rows and span == in_size and in_size % _INT8_STEP == 0 and not has_zeros:
            product, reason = "int8", ""

        def read(rows: slice) -> CodedRows:
            zeros = _of_rows(source.stored(zero), rows) if has_zeros else None
            return CodedRows(
                codes=source.stored(name)[rows],
                scales=_of_rows(source.stored(f"{module}.weight_scale"), rows).float(),
                zeros=None if zeros is None else zeros.to(torch.int8),
            )

        return StoredMatrix(shape=(num_rows, in_size), num_bits=8, span=span, rows=read, product=product, reason=reason)


def _packed(source: Source, module: str) -> StoredMatrix:
    name, zero = f"{module}.weight_packed", f"{module}.weight_zero_point"
    num_rows, num_words = form_required(source, name, (torch.int32,))
    in_size = _in_size(source, f"{module}.weight_shape", num_rows)
    num_bits = next((bits for bits in (4, 8) if num_words == -(-in_size * bits // 32)), 0)
    if not num_bits:
        raise ModelFolderError(
            f"tensor {name!r} has {num_words} words for rows of {in_size}: only codes of 4 and 8 bits are supported."
        )
    span = _span(source, module, num_rows, in_size)
    has_zeros = source.form_of(zero) is not None
    if has_zeros:
        form_required(source, zero, (torch.int32,))
        check_shapes(source, {zero: (-(-num_rows * num_bits // 32), in_size // span)})

    def read(rows: slice) -> CodedRows:
        num_spans, in_word = in_size // span, 32 // num_bits
        zeros = torch.full((rows.stop - rows.start, num_spans), 2 ** (num_bits - 1), dtype=torch.uint8)
        if has_zeros:
            words = source.stored(zero)[rows.start // in_word : -(-rows.stop // in_word)]
            zeros = codes_of(words.T, num_bits).T[: rows.stop - rows.start]
        return CodedRows(
            codes=signed(codes_of(source.stored(name)[rows], num_bits)[:, :in_size], num_bits),
            scales=_of_rows(source.stored(f"{module}.weight_scale"), rows).float(),
            zeros=signed(zeros.contiguous(), num_bits).to(torch.int8),
        )

    order = order_of(source, f"{module}.weight_g_idx", in_size, span)
    product, reason = product_of(span, in_size, order)
    return StoredMatrix(
        shape=(num_rows, in_size),
        num_bits=num_bits,
        span=span,
        rows=read,
        product=product,
        reason=reason,
        order=order,
    )


def _span(source: Source, module: str, num_rows: int, in_size: int) -> int:
    """Return how many elements of a row share a scale."""
    name = f"{module}.weight_scale"
    form = source.form_of(name)
    shape = None if form is None or form[0] not in FLOATS else form[1]
    if shape in ((), (1,), (1, 1), (num_rows,), (num_rows, 1)):
        return in_size
    if shape is None or len(shape) != 2 or shape[0] != num_rows or in_size % max(shape[1], 1) or not shape[1]:
        found = "missing" if form is None else str(form)
        raise ModelFolderError(f"tensor {name!r} is {found}, expected scales of a matrix ({num_rows}, {in_size}).")
    return in_size // shape[1]


def _of_rows(numbers: Tensor, rows: slice) -> Tensor:
    """Return those of some rows `[n, spans]`, of one number, of one for each row, or of several."""
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(rows.stop - rows.start, 1)
    return numbers[rows].reshape(rows.stop - rows.start, -1)


def _in_size(source: Source, name: str, num_rows: int) -> int:
    """Return K, of the shape that is stored beside packed codes."""
    form_required(source, name, (torch.int64, torch.int32), num_dimensions=1)
    check_shapes(source, {name: (2,)})
    rows, in_size = map(int, source.stored(name))
    if rows != num_rows or not 1 <= in_size < 2**31:
        raise ModelFolderError(f"tensor {name!r} states ({rows}, {in_size}), of a matrix of {num_rows} rows.")
    return in_size


def compressed_tensors_of(config: Json) -> CompressedTensors:
    """Return the format that a quantization_config of compressed-tensors states.

    Raises:
        ModelFolderError: it states what is not supported.
    """
    stated = str(config.get("format", "dense"))
    if stated not in _FORMATS:
        raise ModelFolderError(f"quantization_config: format {stated!r} is not one of {', '.join(_FORMATS)}.")
    for name in ("transform_config", "sparsity_config"):
        if config.get(name):
            raise ModelFolderError(f"quantization_config: {name} is not supported.")
    groups = list(objects(config, "config_groups").values())
    weights = [weight for group in groups if (weight := optional(group, "weights"))]
    blocks = [block_of(weight, "block_structure") for weight in weights if weight.get("block_structure")]
    if len(set(blocks)) > 1:
        raise ModelFolderError(
            f"quantization_config: blocks of several sizes are not supported: {sorted(set(blocks))}."
        )
    return CompressedTensors(
        ", ".join(["compressed-tensors", *dict.fromkeys(map(_described, weights))]),
        blocks[0] if blocks else None,
        rounds_rows=any(optional(group, "input_activations").get("num_bits") == _ROUNDED_BITS for group in groups),
    )


def _described(weight: Json) -> str:
    scales = f"groups of {weight['group_size']}" if weight.get("group_size") else f"scales by {weight.get('strategy')}"
    return f"{weight.get('type', 'int')}{weight.get('num_bits', 8)} in {scales}"
