"""GPTQ's format: words run along K, zeros along N; the first form of the format stores zeros less one.

Of a matrix `[N, K]` in groups of g: `qweight` `[K * bits / 32, N]`, `qzeros` `[K / g, N * bits / 32]` int32, `scales`
`[K / g, N]`, and `g_idx` `[K]`, the group of each element of a row. If these are not in order (`desc_act`), groups are
spread over all of K.
"""

from dataclasses import dataclass

import torch

from sluice.engine.errors import ModelFolderError
from sluice.engine.quantized.fields import WHOLE_ROW, choice, flag, group_size_of, groups_described
from sluice.engine.quantized.matrix import CodedRows, StoredMatrix, product_of
from sluice.engine.quantized.source import FLOATS, Source, check_shapes, form_required, order_of
from sluice.engine.quantized.words import codes_of, signed
from sluice.engine.text.json_files import Json

_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word of codes of one."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """Matrices in GPTQ's format."""

    num_bits: int
    group_size: int
    """-1: a group is a whole row."""

    adds_one: bool
    """Whether zeros are stored less one."""

    @property
    def description(self) -> str:
        """See `Format`."""
        return f"GPTQ, {self.num_bits} bits in {groups_described(self.group_size)}"

    def matrix(self, source: Source, module: str) -> StoredMatrix | None:
        """See `Format`."""
        name = f"{module}.qweight"
        if source.form_of(name) is None:
            return None
        num_words, num_rows = form_required(source, name, (torch.int32,))
        in_size = num_words * 32 // self.num_bits
        group_size = in_size if self.group_size == WHOLE_ROW else self.group_size
        num_groups = -(-in_size // group_size)
        form_required(source, f"{module}.scales", FLOATS)
        zero_words = -(-num_rows * self.num_bits // 32)
        check_shapes(source, {f"{module}.scales": (num_groups, num_rows), f"{module}.qzeros": (num_groups, zero_words)})
        form_required(source, f"{module}.qzeros", (torch.int32,))
        order = order_of(source, f"{module}.g_idx", in_size, group_size)
        product, reason = product_of(group_size, in_size, order)
        return StoredMatrix(
            shape=(num_rows, in_size),
            num_bits=self.num_bits,
            span=group_size,
            rows=lambda rows: self._read(source, module, rows),
            product=product,
            reason=reason,
            order=order,
        )

    def _read(self, source: Source, module: str, rows: slice) -> CodedRows:
        codes = codes_of(source.stored(f"{module}.qweight")[:, rows].T, self.num_bits)
        in_word = 32 // self.num_bits
        words = source.stored(f"{module}.qzeros")[:, rows.start // in_word : -(-rows.stop // in_word)]
        if self.adds_one:
            # One was subtracted from each code of a whole word: a zero of 0 has borrowed from the next.
            words = words + _ONES[self.num_bits]
        zeros = codes_of(words, self.num_bits)[:, : rows.stop - rows.start]
        return CodedRows(
            codes=signed(codes, self.num_bits),
            scales=source.stored(f"{module}.scales")[:, rows].T.float(),
            zeros=signed(zeros, self.num_bits).T.to(torch.int8),
        )


def gptq_of(config: Json) -> Gptq:
    """Return the format that a quantization_config of GPTQ states.

    Raises:
        ModelFolderError: it states what is not supported.
    """
    version = choice(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if flag(config, "is_marlin_format"):
        raise ModelFolderError("quantization_config: weights in the order of the Marlin kernels are not supported.")
    return Gptq(choice(config, "bits", (4, 8)), group_size_of(config, WHOLE_ROW), adds_one=version == "gptq")
