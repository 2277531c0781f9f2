"""AWQ's format (`gemm`): words run along N, and hold eight columns in an order of their own.

Of a matrix `[N, K]` in groups of g: `qweight` `[K, N / 8]`, `qzeros` `[K / g, N / 8]` int32, `scales` `[K / g, N]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.engine.errors import ModelFolderError
from sluice.engine.quantized.fields import WHOLE_ROW, choice, flag, group_size_of, groups_described, renamed
from sluice.engine.quantized.matrix import CodedRows, StoredMatrix, product_of
from sluice.engine.quantized.source import FLOATS, Source, check_shapes, form_required
from sluice.engine.quantized.words import codes_of
from sluice.engine.text.json_files import Json

_IN_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight columns is."""


@dataclass(frozen=True, slots=True)
class Awq:
    """Matrices in AWQ's format."""

    group_size: int
    """-1: a group is a whole row."""

    @property
    def description(self) -> str:
        """See `Format`."""
        return f"AWQ, 4 bits in {groups_described(self.group_size)}"

    def matrix(self, source: Source, module: str) -> StoredMatrix | None:
        """See `Format`."""
        name = f"{module}.qweight"
        if source.form_of(name) is None:
            return None
        in_size, num_words = form_required(source, name, (torch.int32,))
        num_rows = num_words * _IN_WORD
        group_size = in_size if self.group_size == WHOLE_ROW else self.group_size
        num_groups = -(-in_size // group_size)
        form_required(source, f"{module}.scales", FLOATS)
        form_required(source, f"{module}.qzeros", (torch.int32,))
        check_shapes(source, {f"{module}.scales": (num_groups, num_rows), f"{module}.qzeros": (num_groups, num_words)})
        product, reason = product_of(group_size, in_size)
        return StoredMatrix(
            shape=(num_rows, in_size),
            num_bits=4,
            span=group_size,
            rows=lambda rows: _read(source, module, rows),
            product=product,
            reason=reason,
        )


def _read(source: Source, module: str, rows: slice) -> CodedRows:
    words = slice(rows.start // _IN_WORD, rows.stop // _IN_WORD)
    return CodedRows(
        codes=_columns(source.stored(f"{module}.qweight")[:, words]).T.contiguous(),
        scales=source.stored(f"{module}.scales")[:, rows].T.float(),
        zeros=_columns(source.stored(f"{module}.qzeros")[:, words]).T.to(torch.int8),
    )


def _columns(words: Tensor) -> Tensor:
    """Return the codes of `words` `[., W]`, in their order: `[., 8 * W]`."""
    return codes_of(words, 4).unflatten(1, (-1, _IN_WORD))[:, :, list(_PLACES)].flatten(1)


def awq_of(config: Json) -> Awq:
    """Return the format that a quantization_config of AWQ states.

    Raises:
        ModelFolderError: it states what is not supported.
    """
    config = renamed(config, {"w_bit": "bits", "q_group_size": "group_size"})
    choice(config, "bits", (4,), 4)
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelFolderError(f"quantization_config: version {version!r} of AWQ is not supported; gemm is.")
    if not flag(config, "zero_point", default=True):
        raise ModelFolderError("quantization_config: AWQ without zero_point is not supported.")
    return Awq(group_size_of(config, 128))
