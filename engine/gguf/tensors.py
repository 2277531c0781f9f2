"""Read tensors of a GGUF, dequantized."""

import mmap

import torch
from torch import Tensor

from sluice.engine.gguf.dequantize import dequantize_into
from sluice.engine.gguf.file import GgufFile


def read_tensor(file: GgufFile, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor in `dtype`. Only its own part of the file is mapped, and only while it is read.

    Raises:
        OSError: the file cannot be read.
    """
    info = file.tensors[name]
    skipped = info.offset % mmap.ALLOCATIONGRANULARITY
    out = torch.empty(info.shape, dtype=dtype)
    with file.path.open("rb") as opened:
        # A private copy of no page: torch takes only memory that may be written.
        content = mmap.mmap(
            opened.fileno(), skipped + info.num_bytes, access=mmap.ACCESS_COPY, offset=info.offset - skipped
        )
    stored = torch.frombuffer(content, dtype=torch.uint8, offset=skipped, count=info.num_bytes)
    dequantize_into(out, stored, info.type)
    return out
