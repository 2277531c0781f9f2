"""Read tensors of a GGUF, dequantized or packed."""

import mmap

import torch
from torch import Tensor

from sluice.engine.gguf.dequantize import dequantize_into
from sluice.engine.gguf.file import GgufFile
from sluice.engine.gguf.grouped import grouped_tensor
from sluice.kernels.linear.grouped import GroupedWeight


def read_tensor(file: GgufFile, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor in `dtype`.

    Raises:
        OSError: the file cannot be read, or is shorter than its header says.
    """
    info = file.tensors[name]
    out = torch.empty(info.shape, dtype=dtype)
    dequantize_into(out, _stored(file, name), info.type)
    return out


def read_grouped(file: GgufFile, name: str) -> GroupedWeight | None:
    """Return a matrix as it is packed; None if its type has no blocks.

    Raises:
        OSError: the file cannot be read, or is shorter than its header says.
    """
    info = file.tensors[name]
    return grouped_tensor(_stored(file, name), info.type, info.shape)


def _stored(file: GgufFile, name: str) -> Tensor:
    """Return a tensor's bytes. Only its own part of the file is mapped, and only while it is used."""
    info = file.tensors[name]
    skipped = info.offset % mmap.ALLOCATIONGRANULARITY
    with file.path.open("rb") as opened:
        try:
            # A private copy of no page: torch takes only memory that may be written.
            content = mmap.mmap(
                opened.fileno(), skipped + info.num_bytes, access=mmap.ACCESS_COPY, offset=info.offset - skipped
            )
        except ValueError as error:
            raise OSError(f"the file was cut after its header was read: {error}") from error
    return torch.frombuffer(content, dtype=torch.uint8, offset=skipped, count=info.num_bytes)
