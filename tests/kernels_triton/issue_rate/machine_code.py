"""The main loop of a compiled kernel, read from its machine code: what it loads, and in how many instructions."""

import re
from dataclasses import dataclass

from tests.kernels_triton.compiler import dump

LANES = 32
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z][\w.]+)([^;]*);")
"""Address, predicate, operation and operands of an instruction of SASS."""

BYTES = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
"""What a load brings to a lane, by the suffix of its operation; 4 without one."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One pass of a warp through an innermost loop, or through a kernel without one."""

    num_instructions: int
    num_bytes: int
    """What it streams from global memory, where all lanes take part: those marked as evicted first, if any are."""

    @property
    def instructions_per_kb(self) -> float:
        """Instructions for 1,024 bytes."""
        return 1024 * self.num_instructions / self.num_bytes


def bulk_loop(cubin: bytes) -> Loop:
    """Return the innermost loop that loads most; all of the kernel if it has none."""
    code = [(int(at, 16), name, rest) for at, _, name, rest in LINE.findall(dump(cubin, "-sass"))]
    backward = [
        (int(target[1], 16), at)
        for at, name, rest in code
        if name == "BRA" and (target := re.search(r"0x([0-9a-f]+)", rest)) and int(target[1], 16) < at
    ]
    inner = [
        (first, last)
        for first, last in backward
        if not any(first <= other and end <= last for other, end in backward if (other, end) != (first, last))
    ]
    loops = [[name for at, name, _ in code if first <= at <= last] for first, last in inner]
    loops = loops or [[name for _, name, _ in code]]
    return max((Loop(len(names), _streamed_bytes(names)) for names in loops), key=lambda loop: loop.num_bytes)


def _streamed_bytes(names: list[str]) -> int:
    loads = [name.split(".") for name in names if name.partition(".")[0] in ("LDG", "LDGSTS")]
    streaming = [suffixes for suffixes in loads if "EF" in suffixes] or loads
    return sum(LANES * next((BYTES[one] for one in suffixes if one in BYTES), 4) for suffixes in streaming)
