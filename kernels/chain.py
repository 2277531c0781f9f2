"""Implementation of each operation on a GPU: its own Triton kernel, or below it torch's operators, which always work.

A process chooses once, before its first step: recorded steps keep what they were recorded with. What chooses is
`engine/execution/start/kernel_trial.py`. Most products in 16 and 32 bits are the library's (cuBLAS), unless the process
is deterministic: then no result of a row depends on the other rows of a step.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

OPERATIONS: Mapping[str, bool] = {
    "adapters": True,
    "copy_blocks": True,
    "experts": False,
    "gated_activation": True,
    "hopper_prefill": True,
    "linear": True,
    "logprobs": True,
    "paged_attention": False,
    "penalties": True,
    "prepare_batch": True,
    "rms_norm": True,
    "sample": True,
    "soft_cap": True,
    "token_masks": True,
    "write_kv": True,
}
"""Operations with a Triton kernel; whether a step can still be recorded with torch's operators in its place.

Those of attention read the lengths of sequences on the host, and those of experts how many rows each has. `linear` is
the product in int8, over packed weights, in 16 bits of very few rows, and any product of a deterministic process.
`hopper_prefill` is attention's kernel for Hopper, below which is its kernel for any GPU.
"""

HOPPER_PREFILL = "hopper_prefill"

INVARIANT = frozenset({"linear", "paged_attention"})
"""Operations with a second kernel, whose result for a row is bitwise the same in any batch. The kernels of the others
compute each row alone, in an order that only its width determines.
"""


class Path(Enum):
    """One implementation of an operation."""

    TRITON = "triton"
    INVARIANT = "invariant"
    TORCH = "torch"
    CPU = "cpu"


_on_torch: dict[str, str] = {}
"""Why each operation that torch's operators compute is not its kernel's."""

_deterministic: list[bool] = [False]
"""Whether a row's result must not depend on its batch; the only element is replaced."""


def path_of(operation: str, tensor: "Tensor") -> Path:
    """Return the implementation for an operation on the device of `tensor`."""
    if not tensor.is_cuda:
        return Path.CPU
    if operation in _on_torch:
        return Path.TORCH
    return Path.INVARIANT if _deterministic[0] and operation in INVARIANT else Path.TRITON


def set_deterministic(value: bool) -> None:
    """Let this process choose implementations whose result for a row does not depend on its batch, or the fastest."""
    _deterministic[0] = value


def is_deterministic() -> bool:
    """Return whether a row's result must not depend on its batch."""
    return _deterministic[0]


def step_down(reasons: Mapping[str, str]) -> None:
    """Let this process compute exactly these operations with torch's operators on a GPU.

    Raises:
        ValueError: an operation is unknown.
    """
    if unknown := reasons.keys() - OPERATIONS.keys():
        raise ValueError(f"there is no operation {', '.join(sorted(unknown))}")
    _on_torch.clear()
    _on_torch.update(sorted(reasons.items()))


def stepped_down() -> dict[str, str]:
    """Return the operations that torch's operators compute on a GPU, with the reasons."""
    return dict(_on_torch)


def can_record() -> bool:
    """Return whether a step can be captured in a CUDA graph."""
    return all(OPERATIONS[operation] for operation in _on_torch)


def successor_of(operation: str) -> str:
    """Name the implementation of an operation that has stepped down."""
    return "attention's other kernels" if operation == HOPPER_PREFILL else "torch's operators"


def description() -> str:
    """Name the choice for fingerprints: results of other kernels may differ in the last bits."""
    on_torch = " ".join(operation for operation in _on_torch if operation != HOPPER_PREFILL)
    without = f", without {HOPPER_PREFILL}" if HOPPER_PREFILL in _on_torch else ""
    mode = ", deterministic" if is_deterministic() else ""
    return "triton" + without + mode + (f", torch for {on_torch}" if on_torch else "")
