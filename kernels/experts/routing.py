"""What a mixture's router is, and what it says of each row."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sluice.kernels.checks import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router: the scores of experts, of which each row takes the best few."""

    weight: Tensor
    """`[E, M]`, or `[E + 1, M]` if there is a shared expert: its gate is the last row. Contiguous, in the dtype of the
    rows."""

    bias: Tensor | None
    """`[E]` float32."""

    num_chosen: int
    """Experts of each row, at least 1."""

    is_normalised: bool
    """Whether the shares of the chosen experts sum to one. Otherwise those of all experts do."""

    has_shared: bool

    def __post_init__(self) -> None:
        """Check the shapes."""
        check(self.weight.dim() == 2 and self.weight.is_contiguous(), "the router's weight must be [E, M], contiguous")
        check(0 < self.num_chosen <= self.num_experts, "{} experts of {}", self.num_chosen, self.num_experts)
        check(self.bias is None or self.bias.shape == (self.num_experts,), "the router's bias must be [E]")

    @property
    def num_experts(self) -> int:
        """E, without a shared one."""
        return self.weight.shape[0] - self.has_shared


class Routing(NamedTuple):
    """The experts of T rows."""

    experts: Tensor
    """`[T, num_chosen]` int32: the best first, of equal ones the one with the lower id first."""

    shares: Tensor
    """`[T, num_chosen]` float32."""

    shared: Tensor | None
    """`[T]` float32: the share of the shared expert."""
