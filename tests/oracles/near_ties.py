"""Where a router nearly ties: two ways to round may choose different experts there, and both be right."""

# transformers' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR = 1e-4
"""Difference of the last score that is chosen and the first that is not; float32 errs by about 1e-6 here."""


def num_settled(model: "PreTrainedModel", token_ids: list[int]) -> int:
    """How many tokens come before the first near tie: later ones may attend to it. All of them in a dense model."""
    num_chosen = getattr(model.config, "num_experts_per_tok", None)
    if num_chosen is None:
        return len(token_ids)
    with torch.inference_mode():
        scores = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    settled = len(token_ids)
    for of_layer in scores:
        ordered = of_layer.float().sort(dim=1, descending=True).values
        if num_chosen == ordered.shape[1]:
            continue
        ties = ordered[:, num_chosen - 1] - ordered[:, num_chosen] < NEAR
        settled = min(settled, int(ties.nonzero()[0])) if bool(ties.any()) else settled
    return settled
