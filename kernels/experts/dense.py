"""A dense feed-forward: two products, of which every row takes part in both."""

from dataclasses import dataclass

from torch import Tensor

from sluice.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class Dense:
    """A feed-forward of one gate: of a layer, or of one expert."""

    gated: Linear
    """M to I, through the gate."""

    down: Linear
    """I to M."""

    @property
    def products(self) -> list[Linear]:
        """Both, in the order of a step."""
        return [self.gated, self.down]

    def __call__(self, x: Tensor) -> Tensor:
        """Compute `x` `[T, M]` to `[T, M]`."""
        return self.down(self.gated(x))
