"""Read tensors of a GGUF, dequantized or packed."""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from sluice.engine.gguf.dequantize import dequantize_into
from sluice.engine.gguf.file import TensorInfo
from sluice.engine.gguf.grouped import grouped_tensor
from sluice.kernels.linear.grouped import GroupedWeight


def read_tensor(path: Path, info: TensorInfo, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of a file in `dtype`.

    Raises:
        OSError: the file cannot be read, or is shorter than its header says.
    """
    out = torch.empty(info.shape, dtype=dtype)
    dequantize_into(out, _stored(path, info), info.type)
    return out


def read_grouped(path: Path, info: TensorInfo) -> GroupedWeight | None:
    """Return a matrix of a file as it is packed; None if its type has no blocks.

    Raises:
        OSError: the file cannot be read, or is shorter than its header says.
    """
    return grouped_tensor(_stored(path, info), info.type, info.shape)


def _stored(path: Path, info: TensorInfo) -> Tensor:
    """Return a tensor's bytes. Only its own part of the file is mapped, and only while it is used."""
    skipped = info.offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as opened:
        try:
            # A private copy of no page: torch takes only memory that may be written.
            content = mmap.mmap(
                opened.fileno(), skipped + info.num_bytes, access=mmap.ACCESS_COPY, offset=info.offset - skipped
            )
        except ValueError as error:
            raise OSError(f"the file was cut after its header was read: {error}") from error
    return torch.frombuffer(content, dtype=torch.uint8, offset=skipped, count=info.num_bytes)
